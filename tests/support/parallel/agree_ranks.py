"""What each rank of test_agree.py does: many shards, written at once, against the cover of the whole."""

from functools import cache
from itertools import pairwise
from unittest import mock

import torch
import torch.distributed as dist
from cases import COMBINED, REPRESENTATIVE

from hqsweep.errors import UserError
from hqsweep.formats import RngKey, parse
from hqsweep.formats.inputs import draw
from hqsweep.parallel.shards.masters import takes_rows
from hqsweep.parallel.shards.shard_agree import operand_of_area, own_area
from hqsweep.parallel.wire.collectives import gather_bytes, maximum_, ordered_reduce_scatter
from hqsweep.quant import (
    GroupedTensor,
    HybridQuantizedTensor,
    HybridQuantizer,
    Place,
    post_all_gather_processing,
    quantize_master_weights,
    quantize_shards_,
    raw_data_sizes,
    replace_raw_data,
)
from hqsweep.quant.delayed import DelayedState, SlotStates

ROWS, COLS = 208, 160
FORMATS = {text: parse(text) for text in (*REPRESENTATIVE, *COMBINED) if not parse(text).delayed}
ROWWISE = [text for text, format in FORMATS.items() if not format.rht]
COLUMNWISE = [text for text, format in FORMATS.items() if not format.row_scaled]
BOTH = [text for text in ROWWISE if text in COLUMNWISE]
SOURCES = ("", "@rowwise_dequantized")
EVERY_PAIR = [f"{row}|{column}{source}" for row in ROWWISE for column in COLUMNWISE for source in SOURCES]
MANY = EVERY_PAIR[::11]
"""Each format in each direction, beside others."""
SOME = [*(f"{row}|{row}{SOURCES[index % 2]}" for index, row in enumerate(BOTH)), *EVERY_PAIR[5::73]]
CUTS = {
    2: {"odd": (0, 37, ROWS), "empty": (0, ROWS, ROWS), "blocks": (0, 128, ROWS)},
    4: {"odd": (0, 5, 37, 150, ROWS), "empty": (0, 69, 138, ROWS, ROWS), "blocks": (0, 32, 64, 128, ROWS)},
}
COLUMN_CUTS = {2: (0, 37, COLS), 4: (0, 5, 37, 70, COLS)}


def key_of(text: str) -> RngKey:
    return RngKey(seed=3, slot=text, step=5)


def values() -> torch.Tensor:
    return draw("normal", ROWS, COLS, dtype=torch.float32)


@cache
def whole_of(text: str) -> HybridQuantizedTensor:
    quantizer = HybridQuantizer.parse(text)
    return HybridQuantizedTensor.quantize(values(), quantizer, source_dtype=torch.bfloat16, key=key_of(text))


def shard_of(text: str, place: Place, shape: tuple[int, int]) -> HybridQuantizedTensor:
    options = {"dtype": torch.float32, "source_dtype": torch.bfloat16, "place": place}
    return HybridQuantizedTensor.empty(shape, HybridQuantizer.parse(text), **options)


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return got.shape == wanted.shape and torch.equal(*(x.contiguous().view(torch.uint8) for x in (got, wanted)))


def difference(shard: HybridQuantizedTensor, whole: HybridQuantizedTensor) -> str:
    """The first buffer of a shard that is not the cover of the whole's, or "" where all are."""
    for direction in shard.metadata.directions:
        cover = shard.metadata.cover(direction)
        if cover.size:
            wanted = operand_of_area(getattr(whole, direction), direction, own_area(whole), cover).buffers
            got = getattr(shard, direction).buffers
            wrong = [name for name in wanted if not same(got[name], wanted[name])]
            if wrong:
                return f"{direction} {wrong[0]}"
    own = shard.metadata.place.area(shard.metadata.matrix)
    return (
        ""
        if shard.rowwise is None or same(shard.dequantize(), own.of(whole.dequantize(), own_area(whole)))
        else "values"
    )


def differences(texts, tensors) -> dict[str, str]:
    places = {text: difference(tensor, whole_of(text)) for text, tensor in zip(texts, tensors, strict=True)}
    return {text: where for text, where in places.items() if where}


def shards(rank: int, world: int, cut: str) -> dict[str, str]:
    """Row shards of many pairs of formats (or some), all written at once."""
    first, last = list(pairwise(CUTS[world][cut]))[rank]
    texts = MANY if (world, cut) == (2, "odd") else SOME
    tensors = [shard_of(text, Place(first, 0, ROWS, COLS), (last - first, COLS)) for text in texts]
    parts = [values()[first:last]] * len(tensors)
    quantize_shards_(tensors, parts, [key_of(text) for text in texts], dist.group.WORLD)
    return differences(texts, tensors)


def columns(rank: int, world: int) -> dict[str, str]:
    """Column shards, and over four ranks blocks of rows and columns, by quantize_ of each."""
    cuts = list(pairwise(COLUMN_CUTS[world]))
    places = [(0, ROWS, *cut) for cut in cuts]
    if world == 4:
        places = [(*rows, *cols) for rows in ((0, 37), (37, ROWS)) for cols in ((0, 53), (53, COLS))]
    top, bottom, left, right = places[rank]
    tensors = []
    for text in SOME:
        tensor = shard_of(text, Place(top, left, ROWS, COLS), (bottom - top, right - left))
        part = values()[top:bottom, left:right]
        tensors.append(tensor.quantize_(part, key=key_of(text), group=dist.group.WORLD))
    return differences(SOME, tensors)


def one_direction(rank: int, world: int) -> dict[str, str]:
    """Shards that hold one direction, of which the other may still be what it is made from."""
    first, last = list(pairwise(CUTS[world]["odd"]))[rank]
    places = {}
    for direction in ("rowwise", "columnwise"):
        options = {"directions": [direction], "dtype": torch.float32, "source_dtype": torch.bfloat16}
        options["place"] = Place(first, 0, ROWS, COLS)
        tensors = [
            HybridQuantizedTensor.empty((last - first, COLS), HybridQuantizer.parse(text), **options) for text in SOME
        ]
        parts = [values()[first:last]] * len(SOME)
        quantize_shards_(tensors, parts, [key_of(text) for text in SOME], dist.group.WORLD)
        places |= {f"{direction} {text}": where for text, where in differences(SOME, tensors).items()}
    return places


def intervals(world: int, numel: int, index: int) -> list[tuple[int, int]]:
    """Uneven fragments of one of several weights that lie in one flat buffer."""
    stops = sorted((numel * (rank + 1) // world + 7919 * (index + 1) * (rank + 1)) % numel for rank in range(world - 1))
    return list(pairwise((0, *stops, numel)))


def fragments(rank: int, world: int) -> dict[str, str]:
    """Whole weights, and shards in both directions and in one, written from flat fragments that end anywhere; of a
    weight a rank may have none."""
    first, last = list(pairwise(CUTS[world]["odd"]))[rank]
    held = [["rowwise", "columnwise"], ["rowwise"], ["columnwise"]]
    weights, masters, offsets, texts = [], [], [], [text for text in SOME for _ in range(4)]
    for index, text in enumerate(texts):
        shape, options = (ROWS, COLS), {"dtype": torch.float32, "source_dtype": torch.bfloat16}
        if index % 4:
            options |= {"directions": held[index % 4 - 1], "place": Place(first, 0, ROWS, COLS)}
            shape = (last - first, COLS)
        weights.append(HybridQuantizedTensor.empty(shape, HybridQuantizer.parse(text), **options))
        start, stop = intervals(world, ROWS * COLS, index)[rank]
        masters.append(values().flatten()[start:stop] if stop > start else None)
        offsets.append(start if stop > start else None)
    quantize_master_weights(weights, masters, offsets, dist.group.WORLD, keys=[key_of(text) for text in texts])
    places = {}
    for text, weight in zip(texts, weights, strict=True):
        whole, meta = whole_of(text), weight.metadata
        where = "" if meta.place is None else difference(weight, whole)
        if meta.place is None:
            where = ", ".join(name for name, x in weight.buffers.items() if not same(x, whole.buffers[name]))
        places |= {f"{text} {meta.place} {meta.directions}": where} if where else {}
    return places


def grouped_fragments(rank: int, world: int) -> bool:
    x, quantizer = torch.randn(3, 32, 48, generator=torch.Generator().manual_seed(0)), "nvfp4+sr|mxfp8"
    options = {"source_dtype": torch.bfloat16, "key": key_of("experts")}
    whole = GroupedTensor.quantize(x, HybridQuantizer.parse(quantizer), **options)
    group = GroupedTensor.empty(x.shape, HybridQuantizer.parse(quantizer), dtype=torch.float32, **options)
    start, stop = intervals(world, x.numel(), 3)[rank]
    quantize_master_weights([group], [x.flatten()[start:stop]], [start], dist.group.WORLD, keys=[options["key"]])
    return all(same(buffer, whole.buffers[name]) for name, buffer in group.buffers.items())


def grouped_shards(rank: int, world: int) -> dict[str, str]:
    """Rows of every expert's matrix, written together, and once more from flat fragments of all experts' masters."""
    experts, rows, cols = 3, 96, 48
    x = draw("normal", experts * rows, cols, dtype=torch.float32).view(experts, rows, cols)
    first, last = list(pairwise({2: (0, 37, rows), 4: (0, 5, 37, 70, rows)}[world]))[rank]
    texts = [
        "nvfp4+sr|mxfp8",
        "mxfp8+2d|nvfp4+sr@rowwise_dequantized",
        "fp8_current",
        "bf16|fp16",
        "nvfp4+row_scaled|mxfp8",
    ]
    options = {"dtype": torch.float32, "source_dtype": torch.bfloat16}
    place = {"place": Place(first, 0, rows, cols)}
    tensors, wholes = [], []
    for text in texts:
        quantizer = HybridQuantizer.parse(text)
        tensors.append(GroupedTensor.empty((experts, last - first, cols), quantizer, **options, **place))
        whole = GroupedTensor.empty(x.shape, quantizer, **options)
        wholes.append(whole.quantize_(x, key=key_of(text)))
    keys, parts = [key_of(text) for text in texts], [x[:, first:last]] * len(texts)
    quantize_shards_(tensors, parts, keys, dist.group.WORLD)
    wrong = _wrong_members("written", tensors, wholes)
    cuts = [intervals(world, x.numel(), index)[rank] for index in range(len(texts))]
    masters = [2 * x.flatten()[start:stop] for start, stop in cuts]
    offsets = [start for start, _ in cuts]
    masters[-1], offsets[-1] = (2 * x.flatten(), 0) if rank == 0 else (x.new_empty(0), None)  # one rank has it all
    quantize_master_weights(tensors, masters, offsets, dist.group.WORLD)
    for whole in wholes:
        whole.quantize_(2 * x)
    return wrong | _wrong_members("from masters", tensors, wholes)


def _wrong_members(when: str, tensors: list[GroupedTensor], wholes: list[GroupedTensor]) -> dict[str, str]:
    wrong = {}
    for tensor, whole in zip(tensors, wholes, strict=True):
        places = [difference(*pair) for pair in zip(tensor.members, whole.members, strict=True)]
        if tensor.metadata.key != whole.metadata.key:
            places.append("key")
        if any(places):
            wrong[f"{tensor.quantizer} {when}"] = str(places)
    return wrong


def poisoned(text: str) -> HybridQuantizedTensor:
    options = {"dtype": torch.float32, "source_dtype": torch.bfloat16}
    weight = HybridQuantizedTensor.empty((ROWS, COLS), HybridQuantizer.parse(text), **options)
    for buffer in weight.buffers.values():
        buffer.view(torch.uint8).fill_(0xA5)
    return weight


def gathered_codes(rank: int, world: int) -> dict[str, object]:
    """Weights in flat buffers of bytes, of which each rank writes what its fragments of the masters are, and gathers
    the rest: codes where columnwise operands follow from them, and nothing elsewhere, where all bytes are written."""
    texts = [*SOME, *(f"{text}|{text}" for text in BOTH if parse(text).two_d), "bf16|nvfp4+rht+sr"]
    weights, buffers, own = [poisoned(text) for text in texts], [], []
    by_codes = [takes_rows(weight) for weight in weights]
    for index, weight in enumerate(weights):
        size = raw_data_sizes(weight).codes if by_codes[index] else raw_data_sizes(weight).all
        buffers.append(torch.empty(size, dtype=torch.uint8))
        replace_raw_data(weight, buffers[index])
        own.append(intervals(world, ROWS * COLS, index)[rank])
    masters = [values().flatten()[start:stop] if stop > start else None for start, stop in own]
    options = {"keys": [key_of(text) for text in texts], "manual_post_all_gather_processing": True}
    quantize_master_weights(weights, masters, [start for start, _ in own], dist.group.WORLD, **options)
    gathered = 0
    for index in (index for index, codes in enumerate(by_codes) if codes):
        buffer, every = buffers[index], gather_bytes(buffers[index])
        before = buffer.clone()
        for other, interval in enumerate(intervals(world, ROWS * COLS, index)):
            first, last = interval[0] * len(buffer) // (ROWS * COLS), -(-interval[1] * len(buffer) // (ROWS * COLS))
            buffer[first:last] = every[other, first:last]
        gathered += not same(buffer, before)
    post_all_gather_processing(weights)
    buffers = [(text, *held) for text, weight in zip(texts, weights, strict=True) for held in weight.buffers.items()]
    wrong = [f"{text} {name}" for text, name, x in buffers if not same(x, whole_of(text).buffers[name])]
    return {"wrong": wrong, "by_codes": sum(by_codes), "gathered": gathered}


def sent_values(rank: int, world: int) -> list[int]:
    """Bytes of values that a rank receives where codes are gathered, and where they are not."""
    weight, received = whole_of("fp8_current").detach().clone(), []
    start, stop = intervals(world, ROWS * COLS, 0)[rank]
    for manual in (True, False):
        exchange = mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single)
        masters, options = [values().flatten()[start:stop]], {"manual_post_all_gather_processing": manual}
        with exchange as calls:
            quantize_master_weights([weight], masters, [start], dist.group.WORLD, **options)
        received.append(sum(call.args[0].numel() for call in calls.call_args_list))
    return received


def delayed(rank: int, world: int) -> list[str]:
    """Three writes under delayed scaling, of shards' values and of fragments: codes and states are the whole's."""
    wrong = []
    first, last = list(pairwise(CUTS[world]["odd"]))[rank]
    for text in ("fp8_delayed|fp8_delayed", "fp8_delayed|fp8_delayed@rowwise_dequantized", "nvfp4+sr|fp8_delayed",
                 "fp8_delayed+local_amax|nvfp4@rowwise_dequantized"):  # fmt: skip
        quantizer, key = HybridQuantizer.parse(text), key_of(text)
        options = {"dtype": torch.float32, "source_dtype": torch.bfloat16, "key": key}
        place = {"place": Place(first, 0, ROWS, COLS)}
        whole = HybridQuantizedTensor.empty((ROWS, COLS), quantizer, **options)
        shard, other = (
            HybridQuantizedTensor.empty((last - first, COLS), quantizer, **options, **place) for _ in range(2)
        )
        for tensor in (whole, shard, other):
            states = {d: DelayedState(4) for d in ("rowwise", "columnwise") if getattr(quantizer, d).delayed}
            tensor.states = SlotStates(states=states, step=0, record=True)
        for step in range(3):
            x = values() * (1 + step)
            whole.quantize_(x, key=key)
            shard.quantize_(x[first:last], key=key, group=dist.group.WORLD)
            start, stop = intervals(world, x.numel(), step)[rank]
            quantize_master_weights([other], [x.flatten()[start:stop]], [start], dist.group.WORLD, keys=[key])
            for tensor in (whole, shard, other):
                tensor.states.use()
            for part in (shard, other):
                where = difference(part, whole)
                for direction, state in whole.states.states.items():
                    own = part.states.states[direction]
                    if not (same(own.history, state.history) and same(own.amax, state.amax)):
                        where = where or f"{direction} state"
                wrong += [f"{text} step {step}: {where}"] if where else []
    return wrong


def no_fragments(rank: int, world: int) -> list[str]:
    """What ranks say where no fragment has the last element."""
    weight, stop = whole_of("mxfp8+2d").detach().clone(), ROWS * COLS - 1
    fragment = (values().flatten()[:stop], 0) if rank == 0 else (None, None)
    options = {"manual_post_all_gather_processing": True}
    try:
        quantize_master_weights([weight], *([each] for each in fragment), dist.group.WORLD, **options)
    except UserError as error:
        return [str(error)]
    return []


def collectives(rank: int, world: int) -> dict[str, bool]:
    rows = [torch.randn(world * 3, 5, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(world)]
    total = rows[0].float()
    for other in rows[1:]:
        total = total + other.float()
    amaxes = [torch.tensor([[float(rank)]]), torch.tensor([torch.nan if rank == 0 else 2.0, torch.nan, torch.inf])]
    maximum_(amaxes)
    codes = torch.tensor([[0.5, -float(rank)]]).to(torch.float8_e4m3fn)
    gathered = gather_bytes(codes).view(torch.float8_e4m3fn).float()
    return {
        "maximum": amaxes[0].item() == world - 1 and amaxes[1].tolist() == [2.0, 0.0, torch.inf],
        "bytes": gathered.tolist() == [[[0.5, -float(r)]] for r in range(world)],
        "sum": same(ordered_reduce_scatter(rows[rank]), total[3 * rank : 3 * rank + 3]),
    }


def refusals(rank: int, world: int) -> list[str]:
    """What every rank says alike: a whole of which nobody holds a part."""
    tensor = shard_of("mxfp8+2d|mxfp8", Place(40 * rank, 0, ROWS, COLS), (20, COLS))
    said = []
    for call in (
        lambda: tensor.quantize_(values()[:20], group=dist.group.WORLD),
        lambda: quantize_master_weights(
            [whole_of("mxfp8")], [values().flatten()[: 9 + rank]], [rank], dist.group.WORLD
        ),
    ):
        try:
            call()
        except UserError as error:
            said.append(str(error))
    return said


def all_cases(rank: int, world: int) -> dict[str, object]:
    functions = (columns, one_direction, fragments, grouped_fragments, grouped_shards, delayed, collectives, refusals)
    functions += (gathered_codes, sent_values, no_fragments)
    results = {f"shards {cut}": shards(rank, world, cut) for cut in CUTS[world]}
    return results | {function.__name__: function(rank, world) for function in functions}
