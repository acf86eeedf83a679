"""Nonfinite: how often, and since which step, the slots of a training have met NaN and inf.

Kernels note NaN and inf in a table (ops/quantize/nonfinite.py). The end of each step adds the table up on the device,
also in a CUDA graph, and the host does not wait. Steps that log read the sums. Sums count steps, so microbatches and
recomputation count once. Over ranks, the rank with the largest count decides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hqsweep.ops.quantize.nonfinite import CAPACITY, WORDS, Seen, entries, format_at, seen_at, table_of
from hqsweep.parallel.mesh import Ranks

MOST_ROWS = 16
"""The most slots with their own rows in the metrics and sentences in the log. The manifest has all slots."""
NORM = "the norm of the gradients"
FIELDS = ("first", "last", "steps")


@dataclass(frozen=True, kw_only=True)
class Met:
    """The NaN or inf that one slot has met."""

    slot: str
    """LAYER.TENSOR.DIRECTION, or NORM."""
    kind: str
    """ "nan", "inf" or "amax" (ops.quantize.nonfinite.Seen)."""
    format: str | None
    lost: bool
    """Whether it was replaced by a number, or holds a scale."""
    first: int
    """The first step with it."""
    last: int
    steps: int
    """The number of steps with it."""
    until: int | None
    """For kind "amax": the last step whose scale it holds; else None."""
    order: int
    """The index of the slot in a step's order of quantization."""

    @property
    def name(self) -> tuple[str, str]:
        return self.slot, self.kind

    def joined(self, other: "Met") -> "Met":
        """This and the record of the same slot in other steps."""
        first, last, until = min(self.first, other.first), max(self.last, other.last), self.until
        if until is not None and other.until is not None:
            until = max(until, other.until)
        return replace(self, first=first, last=last, steps=self.steps + other.steps, until=until)

    @property
    def sentence(self) -> str:
        """A sentence with its steps."""
        when = f" at step {self.first}" if self.steps == 1 else f" in {self.steps} steps ({self.first} to {self.last})"
        return Seen(self.slot, self.kind, self.format, self.lost).sentence(when, self.until)


class Nonfinite:
    """The counts of a training on one device. `met` has the counts that were read, by slot and kind."""

    def __init__(self, device: torch.device, ranks: Ranks) -> None:
        self.ranks, self.table = ranks, table_of(device).words
        self.table.zero_()
        self.sums = torch.zeros(len(FIELDS), CAPACITY, WORDS, dtype=torch.int32, device=device)
        self.norm = torch.zeros(len(FIELDS), dtype=torch.int32, device=device)
        self.met: dict[tuple[str, str], Met] = {}
        self._said: set[tuple[str, str]] = set()

    @torch.no_grad()
    def end_step(self, step: int, counter: Tensor | None, norm: Tensor) -> None:
        """Add the NaN and inf of a step. norm: the norm of its gradients. counter: a tensor to read the step from; or
        None."""
        now = step if counter is None else counter.to(torch.int32).view(())
        _add(self.norm, ~norm.isfinite().view(()), now)
        words = self.table[: entries()]
        if words.is_cpu and not words.any():
            return
        _add(self.sums[:, : len(words)], words != 0, now)
        words.zero_()

    @torch.no_grad()
    def read(self) -> None:
        """Add the counts of all ranks since the last call to `met`. Waits for the device. A collective."""
        sums = self.sums[:, : entries()]
        anything = (sums[2].any() | (self.norm[2] > 0)).to(torch.int32)
        self.ranks.largest(anything)
        if not anything.item():
            return
        own = self._rows(sums.cpu(), self.norm.tolist())
        sums.zero_()
        self.norm.zero_()
        together: dict[tuple[str, str], Met] = {}
        for row in (row for rows in self.ranks.gather(own) for row in rows):
            before = together.get(row.name)
            steps = row.steps if before is None else max(before.steps, row.steps)
            together[row.name] = replace(row if before is None else before.joined(row), steps=steps)
        for name, row in together.items():
            self.met[name] = self.met[name].joined(row) if name in self.met else row

    def _rows(self, sums: Tensor, norm: Sequence[int]) -> list[Met]:
        """The rows of this rank. sums: [FIELDS, entries, WORDS] on the CPU."""
        rows = []
        for entry, word in sums[2].nonzero().tolist():
            seen = seen_at(entry, word)
            if seen is None:
                continue
            first, last, steps = sums[:, entry, word].tolist()
            until, format = None, format_at(entry)
            if seen.kind == "amax" and seen.lost:
                until = last + (1 if format.most_recent else format.history)
            about = {"slot": seen.slot, "kind": seen.kind, "format": seen.format, "lost": seen.lost, "until": until}
            rows.append(Met(**about, first=first, last=last, steps=steps, order=entry))
        if norm[2]:
            about = {"slot": NORM, "kind": "nan", "format": None, "lost": False, "until": None, "order": CAPACITY}
            rows.append(Met(**about, **dict(zip(FIELDS, norm, strict=True))))
        return rows

    @property
    def of_slots(self) -> list[Met]:
        """The records of slots, the earliest first."""
        return sorted((row for row in self.met.values() if row.slot != NORM), key=_order)

    def metrics(self) -> dict[str, float]:
        """For each kind the number of slots, and for the first MOST_ROWS slots the number of steps; {} where nothing
        was met."""
        rows = self.of_slots
        counts = {f"nonfinite_{kind}": float(sum(row.kind == kind for row in rows)) for kind in ("nan", "inf", "amax")}
        own = {f"nonfinite_{row.kind}.{row.slot}": float(row.steps) for row in rows[:MOST_ROWS]}
        return {name: value for name, value in counts.items() if value} | own

    def manifest(self) -> list[dict[str, Any]]:
        """The rows for the manifest."""
        return [asdict(row) | {"sentence": row.sentence} for row in self.of_slots]

    def news(self) -> list[str]:
        """Sentences about slots that no earlier call has named."""
        rows = [row for row in self.of_slots if row.name not in self._said]
        self._said.update(row.name for row in rows)
        more = len(rows) - MOST_ROWS
        return [row.sentence for row in rows[:MOST_ROWS]] + [f"{more} more slots have met NaN or inf"] * (more > 0)

    def began(self) -> str:
        """Where NaN or inf came first, as the end of a sentence; "" where nothing was met."""
        rows, norm = self.of_slots, self.met.get((NORM, "nan"))
        if rows:
            first = rows[0]
            word = "NaN" if first.kind == "nan" else "inf"
            return f", {word} came first in {first.slot} at step {first.first}"
        if norm is None:
            return ""
        return f", {NORM} was not finite from step {norm.first} on, and nothing that was quantized before"

    def state(self) -> dict[str, Any]:
        """The entry of a checkpoint, in a mapping; {} where nothing was met. A collective."""
        self.read()
        return {"nonfinite": [asdict(row) for row in self.met.values()]} if self.met else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state()."""
        rows = [Met(**row) for row in state.get("nonfinite", ())]
        self.met = {row.name: row for row in rows}
        for tensor in (self.table, self.sums, self.norm):
            tensor.zero_()


def _order(row: Met) -> tuple[int, int]:
    return row.first, row.order


def _add(sums: Tensor, seen: Tensor, step: int | Tensor) -> None:
    """Add a step to sums [FIELDS, ...] wherever `seen` is true."""
    first, last, steps = sums.unbind()
    first.copy_(torch.where(seen & (first == 0), step, first))
    last.copy_(torch.where(seen, step, last))
    steps.add_(seen)
