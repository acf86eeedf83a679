"""Which rows a norm writes where they are to arrive."""

from types import SimpleNamespace

import pytest
import torch
from cases import bare

from hqsweep.nn import Linear
from hqsweep.parallel.overlap import overlapped_gemm as module
from hqsweep.parallel.overlap.overlapped_gemm import HIDING_FEATURES, Outgoing, start_values
from hqsweep.parallel.shards.shard_part import Part

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
