"""A held tensor gives up one of its directions: memory, bytes of the other, and what then asks for the dropped one."""

import gc
import weakref

import pytest
import torch
from cases import STATELESS, crossed
from torch import nn

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, quantized_model_init
from hqsweep.quant import GroupedTensor, HybridQuantizedTensor, HybridQuantizer

KEY = RngKey(seed=3, slot="w", step=5)
DIRECTIONS = ("rowwise", "columnwise")


def quantized(text, kind, **options):
    x = draw("normal", 128, 96)
    x = x if kind is HybridQuantizedTensor else x.view(2, 64, 96)
    return x, kind.quantize(x, HybridQuantizer.parse(text), key=KEY, **options)


@pytest.mark.feature("F31", "F37")
@pytest.mark.parametrize(
    ("text", "direction", "kind"), crossed(STATELESS, DIRECTIONS, [HybridQuantizedTensor, GroupedTensor])
)
def test_what_is_left_is_the_tensor_of_the_other_direction(text, direction, kind):
    """Its bytes now, after it is written again, and in its parts; the Parameter stays the one that it was."""
    [other] = set(DIRECTIONS) - {direction}
    (x, w), (_, alone) = quantized(text, kind), quantized(text, kind, directions=[other])
    parameter = nn.Parameter(w)
    assert parameter.drop(direction) is parameter and parameter.drop(direction) is parameter
    assert getattr(parameter, direction) is None and parameter.metadata == alone.metadata
    for value in (x, 2 * x):
        with torch.no_grad():
            parameter.quantize_(value, key=KEY)
            alone.quantize_(value, key=KEY)
        assert parameter.buffers.keys() == alone.buffers.keys()
        assert all(torch.equal(parameter.buffers[name], buffer) for name, buffer in alone.buffers.items())
    assert w.metadata.directions == DIRECTIONS  # views keep theirs


@pytest.mark.feature("F31", "F37")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_memory_is_freed(direction):
    with quantized_model_init():
        module = Linear(96, 64, name="m", recipe="nvfp4|mxfp8")
    held = [weakref.ref(getattr(module.weight, name)) for name in module.weight.buffers if name.startswith(direction)]
    nbytes = sum(buffer.nbytes for buffer in module.weight.buffers.values())
    freed = sum(buffer().nbytes for buffer in held)
    module.weight.drop(direction)
    gc.collect()
    assert held and all(buffer() is None for buffer in held)
    assert sum(buffer.nbytes for buffer in module.weight.buffers.values()) == nbytes - freed


@pytest.mark.feature("F31", "F37")
def test_a_product_that_reads_the_dropped_direction_is_refused():
    with quantized_model_init():
        module = Linear(96, 64, name="m", recipe="nvfp4|mxfp8")
    x = draw("normal", 32, 96)
    with torch.no_grad():
        expected = module(x)
        module.weight.drop("columnwise")
        assert torch.equal(module(x), expected)
    with pytest.raises(UserError, match="columnwise"):
        module(x.requires_grad_())
    with torch.no_grad(), pytest.raises(UserError, match="rowwise is the only direction that this tensor in nvfp4"):
        module.weight.drop("rowwise")


def test_directions_are_two():
    _, w = quantized("mxfp8", HybridQuantizedTensor)
    with pytest.raises(UserError, match="drop: direction is 'row'; allowed: rowwise, columnwise"):
        w.drop("row")
