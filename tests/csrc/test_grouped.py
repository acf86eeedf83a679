"""csrc/{cuda/quantize_grouped.cu,cpu/members.h} with pointers: threads, instruction sets, sums; outputs left out."""

import numpy as np
import pytest
import torch
from support.csrc.kernel_calls import ISAS, KEY, MX, NVFP4, SPECS

from hqsweep import _C
from hqsweep.formats import parse

SIZES = (0, 48, 128, 0, 16, 272)
ROWS, COLS = sum(SIZES), 208
OFFSETS = np.array([0, *np.cumsum(SIZES)], np.int64)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def sample(rows: int, cols: int, device: str) -> torch.Tensor:
    """bf16 over many binades."""
    generator = torch.Generator().manual_seed(rows)
    binades = torch.randint(-20, 20, (rows, cols), generator=generator)
    return (torch.randn(rows, cols, generator=generator) * 2.0**binades).bfloat16().to(device)


def memory(count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Memory full of garbage."""
    return torch.full((max(count, 1) * dtype.itemsize,), 0xA5, dtype=torch.uint8, device=device).view(dtype)


def buffers(fields: dict, rows: int, cols: int, device: str) -> dict[str, torch.Tensor]:
    """Everything that a direction can give for one operand."""
    tiles = [-(-n // fields[name]) if fields[name] else 1 for n, name in ((rows, "tile_rows"), (cols, "tile_cols"))]
    floats = fields["family"] in ("current", "block")
    sizes = {
        "codes": (rows * cols // (2 if fields["element"] in ("e2m1", "e1m2") else 1), torch.uint8),
        "scales": (tiles[0] * tiles[1], torch.float32 if floats else torch.uint8),
        "global_": (rows if fields.get("row_scaled") else 1, torch.float32),
        "exact": (rows * cols, torch.float32),
        "sums": (-(-rows // 128) * -(-cols // 128) * 8, torch.float32),
        "row_errors": (rows * -(-cols // 128), torch.float32),
    }
    return {name: memory(count, dtype, device)[:count] for name, (count, dtype) in sizes.items()}


def direction(fields: dict, to: dict[str, torch.Tensor], amax: torch.Tensor, keys: torch.Tensor | None = None):
    spec = _C.Spec(**{name: value for name, value in fields.items() if name not in KEY})
    pointers = {name: tensor.data_ptr() for name, tensor in to.items()}
    if fields["family"] != "nvfp4":
        pointers.pop("global_", None)
    words = {name: fields.get(name, 0) for name in KEY} | pointers
    return _C.Direction(spec, found=amax.data_ptr(), **words, keys=0 if keys is None else keys.data_ptr())


def run(x: torch.Tensor, row, column, *, offsets: torch.Tensor | None = None, **options) -> None:
    call = x.data_ptr(), {torch.bfloat16: 1, torch.float32: 0}[x.dtype], *x.shape, *x.stride(), row, column, False
    if offsets is not None:
        options |= {"offsets": offsets.data_ptr(), "members": len(offsets) - 1}
    if x.is_cuda:
        options |= {"stream": torch.cuda.current_stream().cuda_stream}
    getattr(_C, f"quantize_{x.device.type}")(*call, **options)


def member(x, fields: dict, start: int, end: int, words: list[int] | None) -> list[dict[str, torch.Tensor]]:
    """Row and column of one expert."""
    part, sides = x[start:end], []
    fields = fields | ({"key0": words[0], "key1": words[1]} if words else {})
    for rows, cols in (part.shape, part.shape[::-1]):
        amax = memory(max(rows, 1), torch.float32, x.device.type)
        sides.append((buffers(fields, rows, cols, x.device.type), amax))
    run(part, *(direction(fields, to, amax) for to, amax in sides))
    return [to for to, _ in sides]


def packed(x, fields: dict, keys: torch.Tensor | None, **options) -> list[dict[str, torch.Tensor]]:
    """Row and column of all experts."""
    device, sides = x.device.type, []
    for columns in (False, True):
        shapes = [(COLS, m) if columns else (m, COLS) for m in SIZES]
        parts = [buffers(fields, *shape, device) for shape in shapes]
        to = {name: memory(sum(p[name].numel() for p in parts), t.dtype, device) for name, t in parts[0].items()}
        sides.append((to, memory(ROWS + len(SIZES) * COLS, torch.float32, device)))
    offsets = torch.from_numpy(OFFSETS).to(device)
    run(x, *(direction(fields, to, amax, keys) for to, amax in sides), offsets=offsets, **options)
    return [to for to, _ in sides]


@devices
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_output_is_that_of_a_call_for_each_expert(spec, device):
    x = sample(ROWS, COLS, device)
    stochastic = spec.get("sr", False)
    words = [[3 + e, 2**31 + 5 * e] for e in range(len(SIZES))]
    keys = torch.tensor(words, dtype=torch.int64).to(torch.int32).to(device) if stochastic else None
    alone = [member(x, spec, OFFSETS[e], OFFSETS[e + 1], words[e] if stochastic else None) for e in range(len(SIZES))]
    variants = [{}] if device == "cuda" else [{"threads": 3}, *({"isa": isa} for isa in ISAS)]
    for options in variants:
        for side, got in enumerate(packed(x, spec, keys, **options)):
            for name, tensor in got.items():
                wanted = torch.cat([each[side][name] for each in alone])
                got_bytes = tensor[: wanted.numel()]
                if name == "global_" and spec["family"] != "nvfp4":
                    continue
                if name in ("sums", "row_errors") and device == "cuda":  # added in another order
                    assert torch.allclose(got_bytes, wanted, rtol=1e-4), (options, side, name)
                else:
                    assert torch.equal(got_bytes.view(torch.uint8), wanted.view(torch.uint8)), (options, side, name)


@pytest.mark.feature("F135")
@devices
@pytest.mark.parametrize("name", [text for text in SPECS if parse(text).two_d and not parse(text).rht])
@pytest.mark.parametrize("shape", [(256, 128), (96, 80)])
def test_columns_alone_are_those_of_both_directions(name, shape, device):
    """Square blocks: without a row, or with a row whose codes and scales have null addresses."""
    x = sample(*shape, device)
    columns, outputs = [], ("codes", "scales", "global_")
    for wanted in (outputs, None, ("global_",)):
        sides = [buffers(SPECS[name], *size, device) for size in (shape, shape[::-1])]
        amaxes = [memory(1, torch.float32, device) for _ in sides]
        row = wanted and direction(SPECS[name], {n: sides[0][n] for n in wanted}, amaxes[0])
        column = direction(SPECS[name], {n: sides[1][n] for n in outputs}, amaxes[1])
        run(x, row, column)
        columns.append(sides[1])
        untouched = [n for n in outputs if n not in (wanted or ())]
        assert all(bool((sides[0][n].view(torch.uint8) == 0xA5).all()) for n in untouched)
    for other in columns[1:]:
        assert all(torch.equal(other[n].view(torch.uint8), columns[0][n].view(torch.uint8)) for n in outputs[:2])


@pytest.mark.feature("F136")
@pytest.mark.parametrize("side", ["row", "column"])
@pytest.mark.parametrize("grouped", [False, True])
def test_scales_without_their_codes_are_refused(side, grouped):
    x, to = torch.zeros(32, 32), buffers(MX, 32, 32, "cpu")
    wanted = direction(MX, {"scales": to["scales"]}, to["exact"])
    sides = (wanted, None) if side == "row" else (None, wanted)
    with pytest.raises(ValueError, match=f"{side}: scales are wanted without the codes that they belong to"):
        run(x, *sides, offsets=torch.tensor([0, 32]) if grouped else None)


@pytest.mark.parametrize(
    ("message", "group"),
    {"members is -1, must be >= 0": (8, -1), "members need offsets": (0, 1)}.items(),
)
def test_wrong_groups_say_what_is_allowed(message, group):
    x = torch.zeros(32, 32)
    with pytest.raises(ValueError, match=message):
        _C.quantize_cpu(x.data_ptr(), 0, 32, 32, 32, 1, None, None, False, 1, "", *group)


def test_no_expert_is_no_work():
    x, to = torch.zeros(0, 32), buffers(NVFP4, 0, 32, "cpu")
    run(x, direction(NVFP4, to, memory(1, torch.float32, "cpu")), None, offsets=torch.tensor([0]))
