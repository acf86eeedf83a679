"""Members of any shapes for tests of groups, and what each is alone."""

import torch
from support.ops.calls import quantize

from hqsweep.formats import RngKey
from hqsweep.formats.inputs import draw
from hqsweep.quant import GroupedTensor, HybridQuantizer
from hqsweep.quant.delayed import DelayedState, SlotStates

SHAPES = {
    "uniform": [(32, 48)] * 3,
    "first": [(32, 48), (16, 48), (64, 48)],
    "last": [(32, 48), (32, 16), (32, 160)],
    "both": [(32, 48), (144, 16), (16, 128)],
    "empty": [(0, 32), (32, 48), (16, 0), (48, 16), (0, 16)],
    "no rows": [(32, 48), (0, 48), (16, 48)],
    "wide": [(16, 128), (32, 384), (16, 256)],
}
KEY = RngKey(seed=3, slot="experts/weight", step=5)


def tensors(shapes, seed=0, dtype=torch.bfloat16):
    """Tensors of different sizes, so that a shared scale would be seen."""
    return [draw("heavy", *s, seed + e).to(dtype) * 10.0 ** (2 * e - 2) for e, s in enumerate(shapes)]


def slot_states(quantizer, count, device="cpu"):
    """States of each member, with an amax of its own, of earlier steps."""
    states = []
    for expert in range(count):
        own = {}
        for direction in ("rowwise", "columnwise"):
            if hasattr(getattr(quantizer, direction), "history"):
                state = own[direction] = DelayedState(getattr(quantizer, direction).history, device)
                state.amax.fill_(3.0 + expert)
        states.append(SlotStates(states=own, step=2, record=True))
    return states if quantizer.delayed else None


def alone(x, quantizer, states=False, key=KEY, **wanted):
    """ops.quantize of each tensor, and of nothing else: (rowwise, columnwise) of every one."""
    operands = []
    for expert, part in enumerate(x):
        keys, grids = quantizer.direction_keys(key.under(str(expert))), {}
        formats = {d: getattr(quantizer, d) if wanted.get(d, True) else None for d in ("rowwise", "columnwise")}
        if states:
            amax = torch.full((1, 1), 3.0 + expert)  # what slot_states remembers
            grids = {f"{d}_grid": {"s": amax} for d, f in formats.items() if hasattr(f, "history")}
        options = {f"{d}_key": own for d, own in keys.items()} | grids
        operands.append(quantize(part, **formats, columnwise_source=quantizer.columnwise_source, **options))
    return operands


def assert_members(group, expected, direction):
    """The bytes, and where they lie: one after the other in one buffer for each of the format's."""
    for name in group.format.layout:
        address = group.buffers[name].data_ptr()
        for own, single in zip(group.members, expected, strict=True):
            got, wanted = own.buffers[name].cpu(), getattr(single, direction)[name]
            assert got.dtype == wanted.dtype and got.shape == wanted.shape and torch.equal(got, wanted), name
            assert own.buffers[name].data_ptr() == address or not got.numel()
            address += got.nbytes
        flat = group.buffers[name]
        assert address == flat.data_ptr() + flat.nbytes


def group(text="mxfp8", name="both", seed=0, **options):
    return GroupedTensor.quantize(tensors(SHAPES[name], seed), HybridQuantizer.parse(text), key=KEY, **options)
