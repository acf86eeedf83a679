"""GroupedLinear on the plan of a GPU, which torch has for a CPU, too, and with splits that the host does not know."""

import pytest
import torch
from experts import EXPERTS, FORMATS, ROWS, SECTIONS, SPLITS, K, N, gradients, grouped, ids

from hqsweep.jobs.inputs import draw
from hqsweep.nn import quantization, quantized_model_init
from hqsweep.ops.grouped_layout import Splits

EXACT_IN_BF16 = [f for f in FORMATS if f not in ("fp16", "fp32", "fp8_block+fp32_scale")]


@pytest.fixture
def used(monkeypatch):
    """How often torch._grouped_mm was called, by number of axes of its second operand; plans are those of a GPU."""
    seen, real = [], torch._grouped_mm

    def spy(a, b, **options):
        seen.append(b.dim())
        return real(a, b, **options)

    monkeypatch.setattr("hqsweep.gemm_grouped.has_kernel", lambda device: True)
    monkeypatch.setattr(torch, "_grouped_mm", spy)
    return seen


def hidden(splits=SPLITS):
    """Splits as a device has them."""
    return Splits(rows=sum(splits), count=len(splits), sizes=None, device_sizes=torch.tensor(splits, dtype=torch.int32))


def run(module, splits, step=1):
    module.zero_grad()
    x = draw("normal", ROWS, K).requires_grad_()
    with quantization(seed=1, step=step):
        y = module(x, splits)
        y.backward(draw("normal", ROWS, N, 1))
    return {"y": y.detach(), "x": x.grad} | {name: g.clone() for name, g in gradients(module).items()}


def assert_close(ours, theirs, rtol):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=rtol, atol=rtol * float(expected.abs().max() + 1e-30))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("quantizers", EXACT_IN_BF16 + SECTIONS, ids=ids)
def test_the_kernel_computes_what_the_loop_does(used, quantizers, single, held):
    """Up to the order of sums: matrices are float32 here, so that nothing else is rounded."""
    with quantized_model_init(enabled=held), quantization(seed=1, step=0):
        module = grouped(quantizers, single_grouped_weight=single, bias=True)
    ours = run(module, hidden())
    assert used == [3, 3, 2]  # fprop, dgrad, and a wgrad without host splits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hqsweep.gemm_grouped.has_kernel", lambda device: False)
        assert_close(ours, run(module, SPLITS), 2**-7)
    assert len(used) == 3


def test_gradients_in_float32_are_a_loop_where_the_host_knows_the_splits(used):
    module = grouped("mxfp8", single_grouped_weight=True)
    run(module, SPLITS)
    assert used == [3, 3]
    run(module.to(torch.bfloat16), SPLITS)
    assert used == [3, 3, 3, 3, 2] and module.weight.grad.shape == (EXPERTS, N, K)


@pytest.mark.parametrize("quantizers", ["bf16", "mxfp8", "fp8_current", SECTIONS[1]], ids=ids)
def test_forward_and_the_gradient_of_the_input_wait_for_no_splits(used, quantizers):
    """Whether they are computed on exact operands of the rows alone; the loop asks for the splits."""
    module, expected = grouped(quantizers), run(grouped(quantizers), SPLITS)
    for weight in module.weights:
        weight.requires_grad_(False)
    splits, x = hidden(), draw("normal", ROWS, K).requires_grad_()
    with quantization(seed=1, step=1):
        y = module(x, splits)
        y.backward(draw("normal", ROWS, N, 1))
    assert "host" not in vars(splits) and used[-2:] == [3, 3]
    assert torch.equal(y, expected["y"]) and torch.equal(x.grad, expected["x"])


@pytest.mark.parametrize("quantizers", FORMATS + SECTIONS, ids=ids)
def test_splits_that_only_a_device_knows_give_the_same_bits(quantizers):
    """On the loop: buffers that have room for any splits hold the same operands."""
    ours, theirs = (run(grouped(quantizers, bias=True), splits) for splits in (hidden(), SPLITS))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
