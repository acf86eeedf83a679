"""The output of a probe of a model's loss: tables of its parts, channels and treatments, and sentences."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hqsweep.jobs.probe.loss import Causes, Part
from hqsweep.jobs.probe.treatments import Treatment
from hqsweep.report.pages.text import TextTable, to_rich


def causes_tables(causes: Causes, arms: Sequence[Treatment], losses: Mapping[str, float], most: int) -> Iterator[Any]:
    """The tables for the terminal, with at most so many rows of each kind of part."""
    for heading, parts in (("layer", causes.layers), ("linears", causes.kinds), ("operand", causes.slots)):
        rows = tuple(_part(part, causes) for part in parts[:most])
        more = f", {len(parts) - most} more" if len(parts) > most else ""
        table = TextTable(header=(heading, "loss", "%", "share"), rows=rows, numeric=frozenset((1, 2, 3)))
        yield to_rich(table, f"{causes.recipe} in one {heading} alone{more}")
    if causes.channels:
        header = ("channel", "times the median", "most in", "outlier in", "massive", "at position")
        rows = tuple(
            (
                str(one.channel), f"{one.ratio:.0f}", one.layer, f"{one.layers} layers",
                "-" if one.massive is None else f"{one.massive:.0f}", str(one.position),
            )
            for one in causes.channels[:most]
        )  # fmt: skip
        yield to_rich(
            TextTable(header=header, rows=rows, numeric=frozenset((0, 1, 4, 5))), "outliers of the residual stream"
        )
    rows = tuple((arm.name, f"{losses[arm.name]:.4f}", _percent(losses[arm.name], causes), arm.why) for arm in arms)
    table = TextTable(header=("arm", "loss", "%", "change"), rows=rows, numeric=frozenset((1, 2)))
    yield to_rich(table, "treatments: the loss at once")


def sentences(causes: Causes) -> list[str]:
    """What the probe has found, in sentences."""
    kept = f"the largest channels of each input carry {100 * causes.channel_share:.0f} % of it"
    lines = [
        f"{causes.recipe} raises the loss of {causes.tokens:,} tokens from {causes.reference:.4f} to {causes.loss:.4f}"
        f" ({_percent(causes.loss, causes)} %) at once; {kept}"
    ]
    massive = [str(one.channel) for one in causes.channels if one.massive is not None]
    if massive:
        lines.append(f"massive activations are in channel{'s' * (len(massive) > 1)} {', '.join(massive)}")
    return [*lines, "a loss at once is not the loss after training: the study says what each treatment is worth there"]


def _part(part: Part, causes: Causes) -> tuple[str, ...]:
    return (part.name, f"{part.loss:.4f}", _percent(part.loss, causes), f"{part.share:.0%}")


def _percent(loss: float, causes: Causes) -> str:
    return f"{100 * (loss / causes.reference - 1):+.2f}"
