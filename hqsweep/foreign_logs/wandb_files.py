"""Reads .wandb files, as W&B writes them for each run: LevelDB's log framing around W&B's protobuf records."""

import struct
from collections.abc import Iterable, Iterator
from typing import Any

from wandb.proto import wandb_internal_pb2 as pb

from hqsweep.config.safe import loads

BLOCK, HEADER, FULL, FIRST, LAST = 32768, 7, 1, 2, 4


def records(data: bytes) -> Iterator[pb.Record]:
    """Whole records up to the end or to a torn tail."""
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        chunk = data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind == 0 or len(chunk) < length:
            return
        parts = chunk if kind in (FULL, FIRST) else parts + chunk
        if kind in (FULL, LAST):
            yield pb.Record.FromString(parts)


def items(entries: Iterable[Any]) -> dict[str, Any]:
    """Key -> value of a record's entries."""
    return {entry.key or ".".join(entry.nested_key): loads(entry.value_json) for entry in entries}
