"""Targets of losses over a vocabulary: torch's values or a refusal on every path, whole, by chunks, and of a model."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from support.models.tiny import tiny, tokens

from hqsweep.errors import UserError
from hqsweep.models.head_loss import HeadLoss
from hqsweep.models.hf import causal_lm_loss
from hqsweep.nn import Linear, linear_cross_entropy, linear_loss
from hqsweep.nn.linear_loss import cross_entropy

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
ROWS, WIDTH, VOCABULARY = 384, 64, 96
IGNORED = {
    "none": [], "one row": [3], "one chunk": slice(128, 256), "the first chunk": slice(0, 128),
    "all but one": slice(1, None), "all": slice(None),
}  # fmt: skip
WAYS = ["chunks", "formed", "whole"]


def build(device="cpu", recipe="mxfp8"):
    torch.manual_seed(0)
    head = Linear(WIDTH, VOCABULARY, name="head", recipe=recipe).to(device)
    h = (0.3 * torch.randn(ROWS, WIDTH)).to(device).requires_grad_()
    return head, h, torch.randint(0, VOCABULARY, (ROWS,)).to(device)


def loss_by(way, head, h, targets):
    return linear_cross_entropy(h, head, targets, {"chunks": 128, "formed": 512, "whole": None}[way])


def results(loss, head, h):
    h.grad = head.weight.grad = None
    loss.backward()
    return loss.detach(), h.grad, head.weight.grad


@devices
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", {"input": "mxfp8", "weight": "mxfp8", "grad_output": "nvfp4"}])
@pytest.mark.parametrize("ignored", IGNORED)
@pytest.mark.parametrize("way", WAYS)
def test_rows_without_a_target_are_those_of_torch(way, ignored, recipe, device):
    if way == "chunks" and isinstance(recipe, dict):
        way = "formed"  # whose rows depend on each other
    head, h, targets = build(device, recipe)
    targets[IGNORED[ignored]] = -100
    loss, dh, dw = results(loss_by(way, head, h.view(3, 128, WIDTH), targets.view(3, 128)), head, h)
    expected = results(F.cross_entropy(head(h).float(), targets), head, h)
    torch.testing.assert_close(loss, expected[0], rtol=1e-5, atol=0, equal_nan=True)
    assert loss.isnan() == (ignored == "all") and not dh[targets == -100].any()
    for gradient, other in zip((dh, dw), expected[1:], strict=True):
        assert (gradient - other).norm() <= (1e-3 if device == "cpu" else 1e-2) * other.norm()


@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_taken_as_torch_takes_them(way):
    head, h, targets = build()
    expected = results(loss_by(way, head, h, targets), head, h)
    ours = results(loss_by(way, head, h, targets.to(torch.uint8)), head, h)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


REFUSED = {
    "target -1 is no entry of a vocabulary of 96; targets are 0 to 95, or -100": lambda t: t.index_fill(0, at(2), -1),
    "target 96 is no entry": lambda t: t.index_fill(0, at(383), 96),
    "target -99 is no entry": lambda t: t.index_fill(0, at(0), -99),
    r"got 380 targets \[380\] on cpu for 384 rows on cpu; every row takes one": lambda t: t[:380],
    r"got 385 targets \[385\]": lambda t: F.pad(t, (0, 1)),
    r"got 1 targets \[\]": lambda t: t[0],
    r"got 384 targets \[384\] on meta for 384 rows on cpu": lambda t: t.to("meta"),
    r"targets are torch.int32 \[384\]; they take int64": lambda t: t.int(),
    "targets are torch.bool": lambda t: t > 3,
    r"targets are torch.float32 \[384, 96\]": lambda t: F.one_hot(t, VOCABULARY).float(),
}


def at(row):
    return torch.tensor([row])


@pytest.mark.parametrize("message", REFUSED)
@pytest.mark.parametrize("way", WAYS)
def test_what_torch_refuses_is_refused(way, message):
    head, h, targets = build()
    name = "cross_entropy" if way == "whole" else "head"
    with pytest.raises(UserError, match=f"^{name}: {message}"):
        loss_by(way, head, h, REFUSED[message](targets))
    with torch.no_grad(), pytest.raises((RuntimeError, IndexError, ValueError)):
        if "float32" in message:
            raise ValueError  # of as many classes torch takes probabilities
        F.cross_entropy(head(h), REFUSED[message](targets))


def test_logits_of_any_shape_are_checked_too():
    logits = torch.randn(2, 4, 8)
    with pytest.raises(UserError, match="cross_entropy: target 8 is no entry of a vocabulary of 8"):
        cross_entropy(logits, torch.full((2, 4), 8))
    assert cross_entropy(logits, torch.full((2, 4), -100)).isnan()


@devices
@pytest.mark.parametrize("ignored", ["one row", "one chunk", "all but one", "all"])
def test_the_loss_of_a_model_by_chunks_ignores_what_the_model_ignores(ignored, device):
    model, got = tiny("llama").train().to(device), []
    inputs, targets = tokens(4, 96).to(device), tokens(4, 96).roll(-1, dims=1).to(device)
    targets.view(-1)[IGNORED[ignored]] = -100
    for around in ({}, {"around": HeadLoss(model, 128)}):
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss, _ = causal_lm_loss(model, inputs, targets, **around)
        loss.backward()
        got.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (own, expected), (ours, gradients) = got
    torch.testing.assert_close(ours, own, rtol=2e-4, atol=0, equal_nan=True)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-2 * gradient.norm(), name


@pytest.mark.gpu
def test_the_kernels_are_the_default_of_a_head_in_bfloat16():
    head, h, targets = build("cuda", "bf16")
    targets[3:200] = -100
    assert linear_loss.forms_loss(head, h)
    ours = results(linear_cross_entropy(h, head, targets), head, h)
    expected = results(F.cross_entropy(head(h).float(), targets), head, h)
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-5, atol=0)
    assert all((a - b).norm() <= 1e-2 * b.norm() for a, b in zip(ours[1:], expected[1:], strict=True))


WRONG = """
import torch
from hqsweep.nn import Linear, linear_cross_entropy
head, h = Linear(64, 96, name="head", recipe="bf16").cuda(), torch.randn(128, 64, device="cuda", requires_grad=True)
targets = torch.zeros(128, dtype=torch.long, device="cuda")
targets[5] = {target}
linear_cross_entropy(h, head, targets, {chunk}).backward()
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("target", "chunk"), [(96, None), (-1, 128), (2**40, 128)])
def test_a_target_beyond_the_vocabulary_is_an_assertion_on_the_device(target, chunk):
    """In a process of its own, since the device takes no other work afterwards."""
    code = WRONG.format(target=target, chunk=chunk)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and "device-side assert" in done.stderr
