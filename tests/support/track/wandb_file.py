"""Reads .wandb files of offline runs without a server: LevelDB's log framing around wandb's protobuf records."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from wandb.proto import wandb_internal_pb2 as pb

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


def items(entries) -> dict:
    return {entry.key or ".".join(entry.nested_key): json.loads(entry.value_json) for entry in entries}


def load(folder: Path) -> SimpleNamespace:
    """Run, config, history rows, summary, artifacts and exit code of the one .wandb file in `folder`."""
    (path,) = folder.glob("*.wandb")
    contents = SimpleNamespace(run=None, config={}, history=[], summary={}, artifacts=[], exit_code=None)
    for record in records(path.read_bytes()):
        match record.WhichOneof("record_type"):
            case "run":
                contents.run = record.run
                contents.config |= items(record.run.config.update)
            case "history":
                contents.history.append(items(record.history.item))
            case "summary":
                contents.summary |= items(record.summary.update)
            case "artifact":
                contents.artifacts.append(record.artifact)
            case "exit":
                contents.exit_code = record.exit.exit_code
    return contents
