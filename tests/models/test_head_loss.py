"""The loss of converted models by chunks of tokens: that of the model itself, its gradients too, or not at all."""

from contextlib import nullcontext

import pytest
import torch
from support.models.tiny import tiny, tokens
from torch import nn

import hqsweep
from hqsweep.models import head_loss as module
from hqsweep.models.conversion import _WAITING
from hqsweep.models.head_loss import BETWEEN, HeadLoss, model_loss, why_whole
from hqsweep.nn import Probe, quantization

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
KINDS = {
    "llama": {}, "llama-tied": {"tie_word_embeddings": True}, "gpt2": {}, "mixtral": {"output_router_logits": True},
    "qwen3": {"intermediate_size": 96, "head_dim": 16}, "gpt_oss": {"output_router_logits": True},
}  # fmt: skip


def build(name: str, **options) -> nn.Module:
    kind = name.partition("-")[0]
    module_options = KINDS.get(name, {}) | options
    return tiny(kind, **module_options).train()


def step(model, around, microbatch=0):
    """Losses and gradients of 4 x 64 tokens in bfloat16 autocast."""
    model.zero_grad()
    inputs, targets = tokens(4, 64), tokens(4, 64).roll(-1, dims=1)
    device = next(model.parameters()).device
    with quantization(step=1, microbatch=microbatch), torch.autocast(device.type, torch.bfloat16):
        loss, aux = model_loss(model, inputs.to(device), targets.to(device), around)
        (loss if aux is None else loss + aux).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), aux if aux is None else aux.detach(), gradients


@pytest.mark.feature("H41")
@devices
@pytest.mark.parametrize("head", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("name", KINDS)
def test_losses_and_gradients_are_those_of_the_model(name, head, device):
    """To the rounding of a gradient of bfloat16 logits."""
    model = build(name)
    assert why_whole(model) is None
    hqsweep.convert(model, {"linear": "mxfp8"} | ({"head": "mxfp8"} if head else {}), head=head)
    model.to(device)
    own, ours = step(model, nullcontext), step(model, HeadLoss(model, 128))
    torch.testing.assert_close(ours[0], own[0], rtol=2e-4, atol=0)
    assert (own[1] is None) == (ours[1] is None) == ("mixtral" not in name and "gpt_oss" not in name)
    if own[1] is not None:
        torch.testing.assert_close(ours[1], own[1], rtol=1e-5, atol=0)
    assert ours[2].keys() == own[2].keys()
    for key, gradient in own[2].items():
        # a rounding of dy moves codes of MXFP8, in the layers too
        assert (ours[2][key] - gradient).norm() <= 6e-2 * gradient.norm(), key


def test_a_projection_in_high_precision_differs_by_bfloat16_alone():
    model = build("llama")
    hqsweep.convert(model, "bf16")
    own, ours = step(model, nullcontext), step(model, HeadLoss(model, 128))
    for key, gradient in own[2].items():
        assert (ours[2][key] - gradient).norm() <= 1e-2 * gradient.norm(), key


def test_the_logits_are_never_whole(monkeypatch):
    model, rows = build("llama"), []
    formed = module.product_cross_entropy
    monkeypatch.setattr(module, "product_cross_entropy", lambda *args: rows.append(args[-1]) or formed(*args))
    step(model, HeadLoss(model, 128))
    assert rows == [128] and "forward" not in model.lm_head.__dict__ and "_loss_function" not in model.__dict__
    step(model, HeadLoss(model))  # a CPU has no kernels
    assert rows == [128]


def test_without_kernels_bits_are_those_of_the_model():
    model = build("mixtral")
    own, ours = step(model, nullcontext), step(model, HeadLoss(model))
    assert torch.equal(own[0], ours[0]) and all(torch.equal(own[2][key], ours[2][key]) for key in own[2])


@pytest.mark.feature("H41")
@pytest.mark.parametrize(
    ("name", "options"),
    [("cohere", {"intermediate_size": 96, "logit_scale": 0.25}),
     ("gemma2", {"intermediate_size": 96, "head_dim": 16, "final_logit_softcapping": 5.0}),
     ("granite", {"intermediate_size": 96, "logits_scaling": 3.0})],
)  # fmt: skip
def test_models_that_change_their_logits_keep_them(name, options):
    assert why_whole(build(name, **options)) == BETWEEN


def test_what_else_keeps_its_logits():
    model = build("llama")
    model.lm_head.register_forward_hook(lambda *_: None)
    assert why_whole(model) == "its output projection has hooks"
    model = build("llama")
    model.lm_head.bias = nn.Parameter(torch.zeros(len(model.lm_head.weight)))
    assert why_whole(model) == "its output projection has a bias"
    model = build("llama")
    model.loss_function = lambda **_: None
    assert why_whole(model) == "its loss is <lambda>"
    model, plain = build("llama"), model.loss_function
    forward = type(model).forward

    def penalized(self, **call):
        out = forward(self, **call)
        out.loss = out.loss + 1e-2 * out.logits.float().logsumexp(-1).square().mean()
        return out

    model.forward = penalized.__get__(model)
    assert why_whole(model) == BETWEEN
    assert why_whole(nn.Linear(2, 2)) == "it is of no Hugging Face model" and plain is not None


def test_the_trial_leaves_no_trace():
    model = build("gpt2", resid_pdrop=0.1)
    before, state = torch.get_rng_state(), {key: value.clone() for key, value in model.state_dict().items()}
    assert why_whole(model) is None and model.training
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert "forward" not in model.lm_head.__dict__ and "_loss_function" not in model.__dict__


def test_a_quantized_projection_is_seen_and_sampled_and_a_plain_one_is_not():
    for head in (False, True):
        model = build("llama")
        conversion = hqsweep.convert(model, "format:mxfp8", head=head)
        probe, targets = Probe(1), tokens(4, 64)
        with quantization(step=1, probe=probe), torch.autocast("cpu", torch.bfloat16):
            model_loss(model, targets, targets, HeadLoss(model, 128))[0].backward()
        assert conversion.unused() == []
        assert ("head" in {row["layer"] for row in probe.rows}) is head
        assert not [part for part in conversion.parts if part.module in _WAITING]
