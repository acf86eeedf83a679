"""GroupedLinear with splits that only a device knows, on the plans of a GPU: nothing waits for them in a training step,
and no expert has a launch of its own."""

from collections import Counter

import pytest
import torch
from cases import BF16_BASES, DELAYED, crossed
from support.nn.experts import GPU, SECTIONS, K, N, gradients, hidden, recipe_of
from torch.utils._python_dispatch import TorchDispatchMode

from hqsweep.formats.inputs import draw
from hqsweep.nn import GroupedLinear, GroupedLinearOptions, quantization, quantized_model_init

BOTH_DELAYED = "fp8_delayed|fp8_delayed+e5m2@rowwise_dequantized"
ROWS_DECODED = {"input": "nvfp4+row_scaled", "weight": "nvfp4", "grad_output": "nvfp4+sr"}
DECODED = {name: f"{row}|fp8_delayed@rowwise_dequantized" for name, row in ROWS_DECODED.items()}
QUANTIZERS = [*BF16_BASES, DELAYED, BOTH_DELAYED, DECODED, *SECTIONS]
OPTIONS = [{"single": True}, {"main_grad": True}, {"main_grad": True, "single": True}, {"held": True}]
with_options = pytest.mark.parametrize(
    ("quantizers", "options"), crossed(QUANTIZERS, OPTIONS, whole=["nvfp4", BOTH_DELAYED]), ids=str
)
WAYS_TO_WAIT = ("tolist", "item", "cpu", "__bool__", "__int__", "__index__", "__float__")

pytestmark = pytest.mark.filterwarnings("error")


def build(experts, quantizers, *, single=False, main_grad=False, held=False):
    """With biases; weights that are not held are bfloat16."""
    torch.manual_seed(0)
    options = {"single_grouped_weight": single, "single_grouped_bias": single, "fuse_wgrad_accumulation": main_grad}
    options = GroupedLinearOptions(bias=True, plan_capability=GPU, **options)
    with quantized_model_init(enabled=held), quantization(seed=1, step=0):
        module = GroupedLinear(experts, K, N, name="e", recipe=recipe_of(quantizers), options=options)
    for weight in module.weights if main_grad else ():
        weight.main_grad = torch.zeros(weight.shape)
    return module if held else module.to(torch.bfloat16)


def step(module, sizes, number, *, on_device=True):
    module.zero_grad()
    x = draw("normal", sum(sizes), K, number).requires_grad_()
    splits = hidden(sizes) if on_device else sizes
    dy = torch.round(draw("normal", sum(sizes), N, number) * 8)
    with quantization(seed=1, step=number):
        y = module(x, splits)
        y.backward(dy)
    assert not on_device or "host" not in vars(splits)
    return {"y": y.detach(), "x": x.grad} | gradients(module)


@pytest.mark.feature("H28", "H29")
@with_options
def test_nothing_waits_for_splits(quantizers, options, monkeypatch):
    """And all bytes are those of splits that the host is given: states, and sums of biases of whole numbers."""
    sizes = (7, 0, 16, 33)
    ours, theirs = build(4, quantizers, **options), build(4, quantizers, **options)
    expected = [step(theirs, sizes, number, on_device=False) for number in (1, 2)]
    for name in WAYS_TO_WAIT:
        monkeypatch.setattr(torch.Tensor, name, lambda *_, what=name: pytest.fail(f"{what} waits"))
    got = [step(ours, sizes, number) for number in (1, 2)]
    monkeypatch.undo()
    for one, other in zip(got, expected, strict=True):
        rounded = {name for name in other if "weight" in name and other[name].dtype == torch.float32}
        assert all(torch.equal(one[name], other[name]) for name in other.keys() - rounded)
        for name in rounded:  # torch._grouped_mm stores bfloat16
            torch.testing.assert_close(one[name], other[name], rtol=2**-7, atol=2**-7 * float(other[name].abs().max()))
    ours, theirs = (dict(module.states.state_dict()) for module in (ours, theirs))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Launches(TorchDispatchMode):
    """How often each operator runs that a device has to be told of, autograd's own sums left out."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and "empty" not in function.name():
            self.seen[function.name()] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.feature("H28", "H29")
@with_options
def test_nothing_is_launched_for_each_expert(quantizers, options):
    counts = []
    for experts in (3, 9):
        module, sizes = build(experts, quantizers, **options), (7, 25, *[17] * (experts - 2))
        step(module, sizes, 1)
        with Launches() as launches:
            step(module, sizes, 2)
        counts.append(launches.seen)
    assert counts[0] == counts[1] and counts[0]["hqsweep::quantize"] + counts[0]["aten::_to_copy"] > 0


@pytest.mark.feature("H28")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("single", [False, True])
def test_gradients_of_biases_are_sums_of_rows(single, dtype):
    """In float32, one row after the other, rounded once to the dtype of the biases; zeros of an expert without rows."""
    module, sizes = build(4, "bf16", single=single).to(dtype), (300, 0, 1, 33)
    dy = draw("normal", sum(sizes), N, 1)
    module(draw("normal", sum(sizes), K), hidden(sizes)).backward(dy)
    got = torch.cat([bias.grad.view(-1, N) for bias in module.biases])
    expected = torch.zeros(4, N)
    for expert, rows in enumerate(dy.float().split(sizes)):
        for row in rows:
            expected[expert] += row
    assert got.dtype == dtype and torch.equal(got, expected.to(dtype))
