"""How often plain weights under fully_shard are quantized, what is there of them meanwhile, and whether operands,
outputs and gradients are those of one process."""

from collections import Counter
from contextlib import contextmanager
from functools import cache
from unittest import mock

import torch
from support.parallel.fsdp2_training import accumulate, batch, build, shard

from hqsweep.nn import quantization
from hqsweep.nn.core.call import LinearCall
from hqsweep.parallel.wire.collectives import by_first
from hqsweep.quant.operand import Operand

SQUARE = ("nvfp4+2d", "mxfp8+2d", "fp8_block+2d", "fp8_current", "mxfp8+2d@rowwise_dequantized")
"""Formats in which the operand of the columns is that of the rows, transposed."""
CASES = {
    "keeps": ({}, False, 1),
    "keeps experts in parameters of their own": ({"single": False}, False, 1),
    "keeps, of data without gradients": ({}, False, 1),
    "keeps and accumulates": ({}, False, 3),
    "keeps and recomputes": ({"inside": False}, False, 1),
    "reshards": ({}, True, 1),
    "reshards and accumulates": ({}, True, 3),
}
"""Options of the model, reshard_after_forward, and microbatches."""


class Watch:
    """Notes of the calls inside: `made`: how often each weight was quantized; `read`: what products read of weights."""

    def __init__(self):
        self.made, self.read = Counter(), []

    @contextmanager
    def watching(self):
        quantize, weight = LinearCall.quantize, LinearCall.weight

        def counted(call, tensor, x, **options):
            self.made.update([call.name] if tensor == "weight" else [])
            return quantize(call, tensor, x, **options)

        def noted(call, weights, direction, **options):
            operand = weight(call, weights, direction, **options)
            self.read.append((call.name, direction, _values(operand)))
            return operand

        with mock.patch.object(LinearCall, "quantize", counted), mock.patch.object(LinearCall, "weight", noted):
            yield


def _values(operand):
    """What an operand says, [N, K] or [E, N, K]."""
    exact = operand.operand() if isinstance(operand, Operand) else operand
    if hasattr(exact, "members"):
        return torch.stack([_values(each) for each in exact.members])
    return exact.matrix.clone() if exact.factor is None else exact.matrix * exact.factor


def train(model, microbatches, held_back, *, of_data):
    """What is watched in each of two steps, outputs, gradients, and the bytes of gathered values that are there once
    forward has run."""
    watched, outputs, left = [], [], []
    for step in (1, 2):
        model.zero_grad()
        watched.append(Watch())
        for part in range(microbatches):
            held_back(model, part == microbatches - 1)
            x = batch(step, part)
            with watched[-1].watching(), quantization(seed=0, step=step, microbatch=part):
                outputs.append(model(x.detach() if of_data else x))
                left.append(sum(weight.value.untyped_storage().nbytes() for weight in _gathered(model)))
                outputs[-1].float().square().mean().backward()
    gradients = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return watched, outputs, gradients, left


def _gathered(model):
    """The weights of a model that ranks have gathered and that are not sharded again."""
    return [p for block in model.blocks for p in block.parameters() if hasattr(p, "value")]


def once(rank, texts, cases):
    """(text, case) -> how often each weight is quantized, in each of two steps; and what differs from one process, or
    should not be there."""
    counts, faults = {}, []
    for text in texts:
        for case in cases:
            counts[text, case], differences = _compared(text, case)
            faults += [(text, case, words) for words in differences]
    return counts, faults


@cache
def _alone(text, options, microbatches, of_data):
    """train() of one process, which the first rank does for all."""
    model = build(text, held=False, **dict(options))
    return by_first(lambda: train(model, microbatches, lambda *_: None, of_data=of_data))


def _compared(text, case):
    options, raf, microbatches = CASES[case]
    of_data = "data" in case
    alone = _alone(text, frozenset(options.items()), microbatches, of_data)
    model = shard(build(text, held=False, **options), raf=raf)
    watched, outputs, gradients, left = train(model, microbatches, accumulate, of_data=of_data)
    differences = [f"{left} bytes of values are left"] if any(left) else []
    for name, ours, theirs in (("output", outputs, alone[1]), ("gradient", gradients, alone[2])):
        differences += [
            f"{name} {i}" for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)
        ]
    for own, other in zip(watched, alone[0], strict=True):
        pairs = zip(own.read, other.read, strict=True)
        differences += [f"operand {a[:2]}" for a, b in pairs if a[:2] != b[:2] or not torch.equal(a[2], b[2])]
    return [set(own.made.values()) for own in watched], differences + _turned(text, watched[0].read)


def _turned(text, read):
    """A fault where the columns of a square format are not its rows, transposed, or those of another are."""
    values = {(name, direction): matrix for name, direction, matrix in read}
    equal = all(
        torch.equal(values[name, "rowwise"], matrix.mT) for (name, d), matrix in values.items() if d == "columnwise"
    )
    return [] if equal == (text in SQUARE) else ["columns are" + " not" * (not equal) + " the rows"]
