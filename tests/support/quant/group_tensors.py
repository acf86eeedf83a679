"""Groups of weights for tests of GroupedTensor, and the same experts one by one."""

from dataclasses import replace

import torch

from hqsweep.formats import RngKey
from hqsweep.formats.inputs import draw
from hqsweep.quant import GroupedTensor, HybridQuantizedTensor, HybridQuantizer

KEY = RngKey(seed=3, slot="experts/grouped_linear/weight", step=5)
E, N, K = 3, 32, 48


def values(seed=0):
    """Experts of different sizes, so that a shared scale would be seen."""
    return draw("normal", E * N, K, seed).view(E, N, K) * torch.tensor([1.0, 100.0, 0.01], dtype=torch.bfloat16).view(
        E, 1, 1
    )


def key_of(expert, key=KEY):
    return replace(key, slot=f"{key.slot}/{expert}")


def alone(x, text, **options):
    quantizer = HybridQuantizer.parse(text)
    return [HybridQuantizedTensor.quantize(part, quantizer, key=key_of(e), **options) for e, part in enumerate(x)]


def grouped(text="mxfp8", x=None, **options):
    x = values() if x is None else x
    return GroupedTensor.quantize(x, HybridQuantizer.parse(text), key=KEY, **options)


def assert_same_bytes(a, b):
    assert a.quantizer == b.quantizer and a.shape == b.shape and a.buffers.keys() == b.buffers.keys()
    assert all(torch.equal(a.buffers[name], b.buffers[name]) for name in a.buffers)
