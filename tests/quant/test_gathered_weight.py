"""GatheredWeight: a tensor whose values are rounded, that nobody writes, and that caches of graphs tell apart."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.quant import HybridQuantizedTensor, HybridQuantizer
from hqsweep.quant.gathered_weight import GatheredWeight

VALUE = draw("normal", 32, 64).bfloat16()


def test_values_are_read_in_its_dtype_and_gradients_are_of_it():
    weight = torch.nn.Parameter(GatheredWeight(VALUE, torch.float32))
    assert type(weight.data) is type(weight[:8]) is GatheredWeight and weight.dtype is torch.float32
    assert torch.equal(weight[:8] * 1, VALUE[:8].float()) and torch.equal(weight.to(torch.bfloat16), VALUE)
    (weight * (1 + 2**-20)).sum().backward()
    assert torch.equal(weight.grad, torch.full((32, 64), 1 + 2**-20))
    assert torch.equal(torch.zeros_like(weight), torch.zeros(32, 64))


def test_writing_is_refused():
    weight = GatheredWeight(VALUE.clone(), torch.float32)
    with pytest.raises(UserError, match="a weight that fully_shard has gathered cannot be written"):
        weight.mul_(2)


def held(text, rows=32):
    return HybridQuantizedTensor.quantize(VALUE[:rows], HybridQuantizer.parse(text))


def test_caches_of_graphs_tell_tensors_apart():
    """By all but values, also where sizes are symbols."""
    a, b = held("mxfp8"), HybridQuantizedTensor.quantize(-VALUE, HybridQuantizer.parse("mxfp8"))
    others = [held("nvfp4"), held("mxfp8|nvfp4"), held("mxfp8", 16), held("mxfp8").requires_grad_()]
    others += [GatheredWeight(VALUE, torch.float32), GatheredWeight(VALUE, torch.bfloat16)]
    hashes = [x._stable_hash_for_caching() for x in (a, *others)]
    assert a._stable_hash_for_caching() == b._stable_hash_for_caching() and len({*hashes}) == len(hashes)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    symbolic = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(VALUE, symbolic_context=context)
    assert GatheredWeight(symbolic, torch.float32)._stable_hash_for_caching() not in hashes
