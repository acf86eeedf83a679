"""The output of probes: of tensors a table by quantizers, a heatmap, and a suggested recipe with its promise; of a
model's loss tables of its parts, channels and treatments."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from hqsweep.errors import visible
from hqsweep.jobs.probe.loss import Causes, Part
from hqsweep.jobs.probe.suggest import Suggestion, foreign_modules
from hqsweep.jobs.probe.treatments import Treatment
from hqsweep.report.figures import svg
from hqsweep.report.figures.look import Panel, colour_range, heatmap
from hqsweep.report.pages import folder, html
from hqsweep.report.pages.text import TextTable, number, to_rich

Row = Mapping[str, Any]
SHOWN = 60
"""The most tensors in the terminal: the ones with the lowest SQNR."""


def probe_table(rows: Sequence[Row]) -> TextTable:
    """The table of SQNR in dB of both directions, and in brackets the lower 5th percentile of rows: "20.4 20.3
    (18.9)"."""
    cells: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        cells.setdefault(row["tensor"], {}).setdefault(row["quantizer"], []).append(row)
    quantizers = tuple(dict.fromkeys(row["quantizer"] for row in rows))
    lines = tuple(
        (
            tensor,
            "x".join(map(str, next(iter(by_quantizer.values()))[0]["shape"])),
            *(_cell(by_quantizer[q]) for q in quantizers),
        )
        for tensor, by_quantizer in cells.items()
    )
    return TextTable(header=("tensor", "shape", *quantizers), rows=lines)


def worst_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of the SHOWN tensors with the lowest SQNR in any format, in the order of the file."""
    lowest: dict[str, float] = {}
    for row in rows:
        known = row["sqnr_db"] if row["sqnr_db"] is not None else float("inf")
        lowest[row["tensor"]] = min(lowest.get(row["tensor"], known), known)
    shown = set(sorted(lowest, key=lowest.__getitem__)[:SHOWN])
    return [row for row in rows if row["tensor"] in shown]


def summary(suggestion: Suggestion, budget: float) -> str:
    """ "5.96 bits an element (budget 6), predicted SQNR 30.6 dB, strict pairs"."""
    left = f"; in bf16 stay {len(suggestion.left_out)}" if suggestion.left_out else ""
    kind = "strict pairs" if suggestion.linears else "any pairs"
    bits = f"{suggestion.bits:.2f} bits an element (budget {budget:g})"
    return f"{bits}, predicted SQNR {suggestion.sqnr_db:.1f} dB, {kind}{left}"


def how_to_use(suggestion: Suggestion, file: Path | None) -> str:
    """A sentence on the models that the recipe fits, and how to use it."""
    foreign, target = foreign_modules(suggestion), file or "RECIPE.yaml"
    if not foreign:
        return f"for the GPT of hqsweep run: recipe={target}"
    return (
        f"for a model with modules named as in the file ({foreign[0]}): hqsweep run ... model=hf model.path=FOLDER"
        f" recipe={target}, or hqsweep.convert(model, {str(target)!r}); hqsweep's own GPT has other names and"
        " refuses it"
    )


def recipe_text(recipe: Mapping[str, Any], *comments: str) -> str:
    """The recipe as YAML that recipe=PATH takes."""
    lines = "".join(f"# {visible(' '.join(comment.split()))}\n" for comment in comments)
    return f"{lines}{yaml.safe_dump(dict(recipe), sort_keys=False, width=120)}"


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write all rows, one line each."""
    folder.write_csv(pd.DataFrame(rows).assign(shape=["x".join(map(str, row["shape"])) for row in rows]), path)


def write_html(rows: Sequence[Row], path: Path, title: str, recipe: str | None, promise: str | None) -> None:
    """Write one page that needs no network."""
    frame = pd.DataFrame(rows)
    columns = pd.MultiIndex.from_frame(frame[["quantizer", "direction"]].drop_duplicates())
    grids = (
        frame.pivot(index="tensor", columns=["quantizer", "direction"], values=value).reindex(
            index=frame["tensor"].unique(), columns=columns
        )
        for value in ("sqnr_db", "format")
    )
    grid, formats = grids
    grid = grid.astype(float)
    fig = heatmap(grid, formats, colour_range(grid.to_numpy()))
    says = f"SQNR in dB of {len(grid)} tensors by format and direction; the table below has all numbers."
    panel = Panel(heading="SQNR", figure=fig, name="probe", rows=frame, says=says)
    page = html.fill(
        "probe.html.j2",
        title=title,
        heatmap=svg.chart(svg.drawing(panel)),
        table=probe_table(rows),
        recipe=recipe,
        summary=promise,
    )
    path.write_text(page, encoding="utf-8")


def _cell(pair: Sequence[Row]) -> str:
    if pair[0]["note"]:
        return "-"
    low = [row["row_sqnr_db_p5"] for row in pair if row["row_sqnr_db_p5"] is not None]
    shown = " ".join(number(row["sqnr_db"], ".1f") for row in pair)
    return f"{shown} ({number(min(low, default=None), '.1f')})"


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


def loss_sentences(causes: Causes) -> list[str]:
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
