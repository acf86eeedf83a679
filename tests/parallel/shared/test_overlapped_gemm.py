"""Which rows a norm writes where they are to arrive."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cases import bare
from torch import nn

from hqsweep.nn import Linear, TransformerLayer, quantization
from hqsweep.nn.core.call import LinearCall
from hqsweep.parallel.shards.shard_part import Part
from hqsweep.parallel.shared import linear as shared_linear
from hqsweep.parallel.shared import overlapped_gemm as module
from hqsweep.parallel.shared.linear import TensorParallel
from hqsweep.parallel.shared.overlapped_gemm import HIDING_FEATURES, LayerWeights, Outgoing, Prefetched, start_values
from hqsweep.parallel.wire import p2p_copy

CPU = torch.device("cpu")
ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


class Noting(nn.Module):
    """A linear that notes the inputs for which it makes operands, and makes none of width 0."""

    def __init__(self):
        super().__init__()
        self.shapes = []
        self.parallel = SimpleNamespace(layer=None)

    def make(self, shape):
        self.shapes.append(shape)
        return f"operand {len(self.shapes)}" if shape[-1] else None


@pytest.fixture
def owed(monkeypatch):
    """What is to be done before the next wait."""
    work = []
    monkeypatch.setattr(p2p_copy, "owe", lambda group, device, each, purpose=None: work.append(each))
    return work


def test_a_layer_makes_its_operands_in_one_wait_and_gives_each_once(owed):
    first, second = Noting(), Noting()
    weights = LayerWeights({first: partial(first.make, (8,)), second: partial(second.make, (8, 0))})
    assert weights.take(first).take("rowwise") is None  # nobody has waited yet
    weights.owe(None, CPU)
    owed.pop()()
    weights.owe(None, CPU)
    assert owed == [] and (first.shapes, second.shapes) == ([(8,)], [(8, 0)])
    assert weights.take(first).take("rowwise") == "operand 1"
    assert weights.take(first).take("rowwise") is None and weights.take(second).take("rowwise") is None


def test_linears_have_the_weights_of_their_layer_within_its_call_alone():
    first, second = Noting(), Noting()
    weights = LayerWeights({})
    with pytest.raises(RuntimeError), weights.lent(first, second):
        assert first.parallel.layer is weights and second.parallel.layer is weights
        raise RuntimeError
    assert first.parallel.layer is None and second.parallel.layer is None


def test_backward_makes_what_it_multiplies_in_its_order():
    made = []
    makers = {name: (lambda name=name: made.append(name)) for name in ("qkv", "proj", "fc1", "fc2")}
    weights = LayerWeights({})
    weights.made_in_backward(makers["qkv"])
    of_proj = weights.made_in_backward(makers["proj"])
    of_fc2 = weights.made_in_backward(makers["fc2"], makers["fc1"])
    for each in of_fc2:
        each()
    assert made == ["fc2", "fc1", "proj", "qkv"]
    assert of_proj == [makers["proj"], makers["qkv"]]


def test_the_operand_is_the_one_that_a_call_would_make_unless_somebody_observes_the_call():
    linear = Linear(64, 32, name="l", recipe="mxfp8")
    linear.parallel = TensorParallel(group=ALONE, mode="column")
    with quantization(step=1), torch.no_grad():
        operand = linear.parallel.prefetch(linear, (4, 8))
        expected = linear.quantizers.weight.quantize(linear.weight.bfloat16(), rowwise="exact").rowwise
    assert torch.equal(operand.matrix, expected.matrix)
    linear.register_forward_pre_hook(lambda *_: None)
    assert linear.parallel.prefetch(linear, (4, 8)) is None


def test_a_layer_of_one_rank_makes_nothing_early(monkeypatch):
    monkeypatch.setattr(shared_linear.TensorParallel, "prefetch", lambda *_: pytest.fail("made early"))
    layer = TransformerLayer(32, 64, 2, name="layer", recipe="bf16", dtype=torch.float32)
    layer(torch.randn(2, 4, 32)).sum().backward()


def test_operands_of_weights_that_may_change_are_not_made_early():
    def early(recipe, weight=None, **options):
        linear = Linear(64, 64, name="l", recipe=recipe)
        with quantization(step=1, **options):
            call = LinearCall(**linear.linear_facts())
        made = Prefetched()
        made.make(call, [linear.weight if weight is None else weight], "rowwise")
        return made

    made = early("mxfp8")
    operand = made.take("rowwise")
    assert made.take("rowwise") is None  # it is given once
    assert operand.matrix.shape == (64, 64) and not operand.matrix.requires_grad
    assert early("fp8_delayed").take("rowwise") is None  # which histories are part of
    freed = nn.Parameter(torch.zeros(64, 64))
    freed.untyped_storage().resize_(0)
    assert early("mxfp8", freed).take("rowwise") is None


X = torch.empty(2, 64, 128, device="meta")
GROUP = SimpleNamespace(size=lambda: 2, rank=lambda: 1)


@pytest.fixture
def started(monkeypatch):
    """The exchanges that begin, of any device."""
    started = []

    def start_lent_rows(shape, dtype, group, device):
        started.append((shape, dtype))
        return SimpleNamespace(rows=torch.empty(shape, dtype=dtype, device="meta"))

    def start(size, group, device, *, reading):
        started.append((size, reading))
        return "sending"

    monkeypatch.setattr(module.p2p_copy, "start", start)
    monkeypatch.setattr(module, "start_lent_rows", start_lent_rows)
    return started


def input_quantizer(text):
    return Linear(128, 128, name="l", recipe=bare(text)).quantizers.input


def test_a_norm_sends_values_that_a_short_product_takes(started):
    part = Part(group=GROUP, axis=0)
    few = HIDING_FEATURES - 1
    assert start_values(input_quantizer("bf16"), part, few, X, torch.bfloat16) == "sending"
    assert started == [(2 * 64 * 128 * 2, True)]
    assert start_values(input_quantizer("mxfp8"), part, few, X, torch.bfloat16) is None  # codes are no values
    assert start_values(input_quantizer("bf16"), part, HIDING_FEATURES, X, torch.bfloat16) is None
    assert start_values(input_quantizer("bf16"), part, few, X, torch.float32) is None
    assert start_values(input_quantizer("bf16"), Part(group=GROUP, axis=0, runs=2), few, X, torch.bfloat16) is None
    assert start_values(input_quantizer("bf16"), None, few, X, torch.bfloat16) is None and len(started) == 1


@pytest.mark.parametrize(("recipe", "placed"), [("bf16", True), ("mxfp8", True), ("nvfp4", False)])
def test_a_gradient_has_a_place_unless_its_codes_are_fewer_bytes(recipe, placed, started):
    part = Part(group=GROUP, axis=0)
    call = SimpleNamespace(tokens_of=lambda *_: part, quantizer=lambda _: input_quantizer(recipe))
    outgoing = Outgoing(call=call, tensor="grad_output", rowwise="exact", columnwise="exact")
    place = outgoing.place(X, torch.bfloat16)
    assert (place is not None) == placed and started == [((128, 128), torch.bfloat16)] * placed
    if placed:
        assert place.shape == X.shape and place.dtype is torch.bfloat16
