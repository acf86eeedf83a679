"""The cross entropy of a linear by chunks of tokens: values and gradients of Linear and torch's cross entropy."""

import pytest
import torch
import torch.nn.functional as F
from cases import DELAYED, LINEARS, REPRESENTATIVE, bare

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.formats.inputs import draw
from hqsweep.nn import (
    Linear,
    LinearOptions,
    Probe,
    linear_cross_entropy,
    quantization,
    quantized_model_init,
    set_recipe,
)
from hqsweep.nn import linear_loss as module
from hqsweep.nn.linear_loss import chunk_rows, forms_loss, is_by_rows
from hqsweep.quant import HybridQuantizer
from hqsweep.recipe import QuantizerRole, Recipe
from hqsweep.recipe.sections import LinearQuantizers

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
RECIPES = ["bf16", "mxfp8", "fp8_block+2d", "mxfp8|mxfp4@rowwise_dequantized",
           {"input": "nvfp4", "weight": "nvfp4+2d", "grad_output": "mxfp8"},
           {"input": "fp8_current", "weight": "fp8_delayed", "grad_output": "nvfp4+row_scaled|mxfp8"}]  # fmt: skip
TIED = {"bf16": "fp8_current", "nvfp4": "nvfp4+2d", "mxfp8": "nvfp4+sr"}
WHOLE = [*({"input": x, "weight": x, "grad_output": dy} for x, dy in TIED.items()),
         LINEARS["nvfp4"], DELAYED,
         {"input": "mxfp8", "weight": "mxfp8", "grad_output": "fp8_current|mxfp8@rowwise_dequantized"}]  # fmt: skip
ROWS, WIDTH, VOCABULARY = 384, 64, 96


def build(quantizers, device="cpu", **options):
    torch.manual_seed(0)
    head = Linear(WIDTH, VOCABULARY, name="head", recipe=bare(quantizers), options=LinearOptions(**options)).to(device)
    h = (0.3 * draw("normal", ROWS, WIDTH)).to(device, torch.float32).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(1)).to(device)
    return head, h, targets


def losses_and_gradients(loss, head, h):
    loss.backward()
    return loss.detach(), h.grad, head.weight.grad


def assert_same_training(ours, expected):
    """Losses to float32's rounding, and on a GPU to that of a few logits; gradients to that of operands in 8 bits."""
    torch.testing.assert_close(ours[0], expected[0], rtol=1e-5 if ours[0].is_cuda else 1e-6, atol=0)
    for gradient, other in zip(ours[1:], expected[1:], strict=True):
        assert gradient.dtype == other.dtype
        assert (gradient - other).norm() <= 1e-2 * other.norm()


@pytest.mark.feature("H5")
@devices
@pytest.mark.parametrize("chunk", [128, 256, 384, None])
@pytest.mark.parametrize("quantizers", RECIPES, ids=str)
def test_chunks_are_the_loss_of_the_whole(quantizers, chunk, device):
    head, h, targets = build(quantizers, device)
    with quantization(step=1):
        expected = losses_and_gradients(F.cross_entropy(head(h).float(), targets), head, h)
    head, h, targets = build(quantizers, device)
    with quantization(step=1):
        ours = linear_cross_entropy(h.view(3, 128, WIDTH), head, targets.view(3, 128), chunk)
    assert_same_training(losses_and_gradients(ours, head, h), expected)


@devices
@pytest.mark.parametrize("quantizers", WHOLE, ids=str)
def test_formats_that_tie_rows_are_one_chunk(quantizers, device):
    """Whole logits are formed: random bits are those of the linear, and amaxes those that its search finds."""
    head, h, targets = build(quantizers, device)
    with quantization(step=1):
        expected = losses_and_gradients(F.cross_entropy(head(h).float(), targets), head, h)
    head, h, targets = build(quantizers, device)
    with quantization(step=1):
        ours = linear_cross_entropy(h, head, targets, 512)
    assert_same_training(losses_and_gradients(ours, head, h), expected)


@pytest.mark.parametrize("text", [t for t in REPRESENTATIVE if "row_scaled" not in t])
def test_an_amax_that_is_known_changes_no_byte(text):
    quantizer = HybridQuantizer.parse(text)
    if quantizer.delayed:
        assert not quantizer.takes_amax
        return
    key = RngKey(seed=0, slot="x", step=1)
    x = draw("heavy", 64, 96).bfloat16()
    both = {"rowwise": "codes", "columnwise": "codes", "key": key}
    searched = quantizer.quantize(x, **both)
    told = quantizer.quantize_under(x, x.float().abs().max().view(1, 1), **both)
    for a, b in ((searched.rowwise, told.rowwise), (searched.columnwise, told.columnwise)):
        assert all(torch.equal(a.buffers[name], b.buffers[name]) for name in a.buffers)
    assert quantizer.takes_amax == (quantizer.rowwise.scaling in ("tensor", "nvfp4"))


@devices
def test_in_high_precision_gradients_are_those_of_float64(device):
    head, h, targets = build("bf16", device)
    ours = losses_and_gradients(linear_cross_entropy(h, head, targets, 128), head, h)
    x, w = (tensor.detach().bfloat16().double().requires_grad_() for tensor in (h, head.weight))
    loss = F.cross_entropy(x @ w.t(), targets)
    loss.backward()
    torch.testing.assert_close(ours[0].double(), loss.detach(), rtol=1e-4, atol=0)  # logits are rounded to bfloat16
    for gradient, expected in zip(ours[1:], (x.grad, w.grad), strict=True):
        assert (gradient.double() - expected).norm() <= 2**-7 * expected.norm()


@pytest.mark.parametrize("text", REPRESENTATIVE)
def test_which_formats_quantize_rows_by_themselves(text):
    """Formats whose codes of 128 rows are those in the whole say so, and no other."""
    quantizers = HybridQuantizer.parse(f"{text}|mxfp8" if "row_scaled" in text else text)
    by_rows = is_by_rows(LinearQuantizers(input=quantizers, weight=quantizers, grad_output=quantizers))
    needs_more = quantizers.delayed or quantizers.stochastic
    assert not (by_rows and needs_more)
    if needs_more:
        return
    x = (draw("heavy", 256, 128) * torch.linspace(1, 9, 256)[:, None]).float()
    whole, parts = quantizers.quantize(x), [quantizers.quantize(part) for part in x.split(128)]
    equal = torch.equal(whole.rowwise.dequantize(), torch.cat([p.rowwise.dequantize() for p in parts]))
    columns = torch.cat([p.columnwise.dequantize() for p in parts], dim=1)
    assert by_rows == (equal and torch.equal(whole.columnwise.dequantize(), columns))


def test_a_factor_that_comes_in_multiplies_the_gradients():
    head, h, targets = build("mxfp8")
    expected = losses_and_gradients(linear_cross_entropy(h, head, targets, 128), head, h)
    head, h, targets = build("mxfp8")
    ours = losses_and_gradients(linear_cross_entropy(h, head, targets, 128) * 0.25, head, h)
    for gradient, other in zip(ours[1:], expected[1:], strict=True):
        assert torch.equal(gradient, other * 0.25)


@pytest.mark.feature("H5")
@devices
@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_a_probe_sees_whole_tensors_and_changes_no_bit(recipe, device):
    rows = []
    for forward in (
        lambda *all: linear_cross_entropy(*all, 128),
        lambda h, head, t: F.cross_entropy(head(h).float(), t),
    ):
        head, h, targets = build(recipe, device)
        plain = losses_and_gradients(forward(h, head, targets), head, h)
        head, h, targets = build(recipe, device)
        probe = Probe(1, capture=True)
        with quantization(step=1, probe=probe):
            loss = forward(h, head, targets)
        probed = losses_and_gradients(loss, head, h)
        assert all(torch.equal(a, b) for a, b in zip(plain, probed, strict=True))
        rows.append((probe.rows, probe.captured))
    (ours, captured), (expected, whole) = rows
    assert [(r["tensor"], r["direction"]) for r in ours] == [(r["tensor"], r["direction"]) for r in expected]
    assert captured.keys() == whole.keys()
    assert all(captured[name].shape == whole[name].shape for name in whole)


def test_a_main_grad_takes_the_gradient_of_the_weight():
    head, h, targets = build("mxfp8")
    expected = losses_and_gradients(linear_cross_entropy(h, head, targets, 128), head, h)
    head, h, targets = build("mxfp8", fuse_wgrad_accumulation=True)
    head.weight.main_grad = torch.ones(VOCABULARY, WIDTH)
    linear_cross_entropy(h, head, targets, 128).backward()
    assert head.weight.grad is None and torch.equal(h.grad, expected[1])
    assert torch.equal(head.weight.main_grad, expected[2] + 1)


def test_weights_that_are_held_quantized_serve_as_they_are():
    with quantized_model_init():
        head, h, targets = build("mxfp8")
    expected = losses_and_gradients(F.cross_entropy(head(h).float(), targets), head, h)
    with quantized_model_init():
        head, h, targets = build("mxfp8")
    assert_same_training(losses_and_gradients(linear_cross_entropy(h, head, targets, 128), head, h), expected)


def test_without_gradients_nothing_is_made_for_backward():
    head, h, targets = build({"input": "mxfp8", "weight": "mxfp8", "grad_output": "nvfp4+sr"})
    with torch.no_grad():
        ours = linear_cross_entropy(h, head, targets, 128)
        assert not ours.requires_grad
        torch.testing.assert_close(ours, F.cross_entropy(head(h).float(), targets), rtol=1e-6, atol=0)


def test_whose_loss_is_formed(monkeypatch):
    head, h, targets = build("mxfp8")
    assert not forms_loss(head, h)  # a CPU has no kernel, and computes as it always did
    assert torch.equal(linear_cross_entropy(h, head, targets), F.cross_entropy(head(h).float(), targets))
    monkeypatch.setattr(module, "use_kernels", lambda x: True)
    assert forms_loss(head, h)
    biased = Linear(WIDTH, 96, name="n", recipe="mxfp8", bias=True)
    precise = Linear(WIDTH, 96, name="n", recipe="mxfp8", dtype=torch.float32)
    head.output_quantizer_role = QuantizerRole("linear", "input", "reader")
    set_recipe(head, Recipe.from_config({"linear": "mxfp8"}))
    assert not any(forms_loss(other, h) for other in (biased, precise, head))


@pytest.mark.parametrize(
    ("grad_output", "chunk", "message"),
    [
        ("mxfp8", 100, "head: a chunk has 100 rows; it takes a multiple of 128"),
        ("nvfp4", 128, "head: grad_output is nvfp4, in which rows depend on each other; leave chunk out"),
    ],
)
def test_what_it_refuses(grad_output, chunk, message):
    head, h, targets = build({"input": "mxfp8", "weight": "mxfp8", "grad_output": grad_output})
    with pytest.raises(UserError, match=message):
        linear_cross_entropy(h, head, targets, chunk)


def test_heads_that_do_not_go_by_chunks_say_so():
    _, h, targets = build("mxfp8")
    head = Linear(WIDTH, VOCABULARY, name="head", recipe="format:mxfp8", bias=True)
    with pytest.raises(UserError, match="head: a linear with a bias, or with a quantizer of its output, takes no"):
        linear_cross_entropy(h, head, targets, 128)
    expected = F.cross_entropy(head(h).float(), targets)
    assert torch.equal(linear_cross_entropy(h, head, targets), expected)


def test_native_products_take_operands_whole():
    _, h, targets = build("bf16")
    head = Linear(WIDTH, VOCABULARY, name="head", recipe=Recipe.from_config({"linear": "bf16", "gemm": "native"}))
    with pytest.raises(UserError, match="head: gemm=native takes operands whole; leave chunk out"):
        linear_cross_entropy(h, head, targets, 128)
    whole = losses_and_gradients(linear_cross_entropy(h, head, targets, 384), head, h)
    assert_same_training(whole, losses_and_gradients(*expected_of(head, h, targets)))


def expected_of(head, h, targets):
    head.weight.grad = h.grad = None
    return F.cross_entropy(head(h).float(), targets), head, h


def test_gradients_are_given_to_one_backward():
    head, h, targets = build("bf16")
    loss = linear_cross_entropy(h, head, targets, 128)
    loss.backward(retain_graph=True)
    with pytest.raises(UserError, match="were given to a backward before"):
        loss.backward()


@pytest.mark.parametrize("rows", [0, 1, 128, 200, 32768])
@pytest.mark.parametrize("vocabulary", [1, 256, 50304, 2**23])
def test_chunks_are_few_and_equal(rows, vocabulary):
    chunk = chunk_rows(rows, vocabulary)
    assert chunk % 128 == 0 and (chunk == 128 or 2 * (chunk - 128) * vocabulary < module.CHUNK_BYTES)
    count = max(-(-rows // chunk), 1)
    assert count * chunk - rows < 128 * count or count == 1
    assert 2 * chunk * vocabulary <= module.CHUNK_BYTES or chunk == 128


def test_no_tokens_have_no_mean():
    head, h, targets = build("bf16")
    assert linear_cross_entropy(h[:0], head, targets[:0]).isnan()
