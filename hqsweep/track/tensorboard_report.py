"""The verdicts of a comparison beside runs that TensorBoard tracks: a table and the forest plot, both as text, because
TensorBoard shows no SVG."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from hqsweep.errors import visible
from hqsweep.track.harmless import one_line
from hqsweep.track.tables import VERDICT_COLUMNS
from hqsweep.track.tensorboard import markdown_table

WIDTH = 61
"""Characters of the forest plot's axis."""


def log_report(sweep_path: Path, report: Path, arms: Sequence[Mapping[str, Any]]) -> bool:
    """The texts `verdicts` and `forest` and the scalars gap_pct/ARM of `arms` (of `hqsweep compare --json`) in
    SWEEP/tensorboard/REPORT, in place of an earlier comparison. Returns whether they are kept; never raises."""
    folder = sweep_path / "tensorboard" / report.name
    try:
        if not folder.parent.is_symlink():  # nothing behind a link is deleted
            shutil.rmtree(folder, ignore_errors=True)
        with SummaryWriter(str(folder)) as writer:
            writer.add_text("verdicts", markdown_table([{name: arm[name] for name in VERDICT_COLUMNS} for arm in arms]))
            writer.add_text("forest", f"```text\n{forest_text(arms)}\n```")
            for arm in arms:
                if arm["gap"] is not None:
                    writer.add_scalar(f"gap_pct/{visible(arm['arm'])}", arm["gap"], 0)
    except Exception as error:
        print(f"tensorboard: report: {one_line(error)}; it is in {report}", flush=True)
        return False
    return True


def forest_text(arms: Sequence[Mapping[str, Any]]) -> str:
    """One line for each arm that has a gap, from the lowest to the highest: o at the gap, - over its interval, | at 0,
    : at both ends of the margin, then the verdict. Gaps are in % of the baseline's loss."""
    drawn = sorted((arm for arm in arms if arm["gap"] is not None), key=lambda arm: arm["gap"])
    if not drawn:
        return "no arm has a gap"
    ends = [value for arm in drawn for value in _interval(arm)] + [
        sign * arm["margin"] for arm in drawn for sign in (-1, 1)
    ]
    low, high = min(ends), max(ends)

    def at(value: float) -> int:
        return round((value - low) / (high - low) * (WIDTH - 1))

    names = [visible(arm["arm"]).replace("`", "'") for arm in drawn]  # it stands in a block of code
    name_width = max(map(len, names))
    lines = [f"{'':{name_width}}  {f'{low:+.3g} %':<{WIDTH // 2}}{f'{high:+.3g} %':>{WIDTH - WIDTH // 2}}"]
    for arm, name in zip(drawn, names, strict=True):
        line = [" "] * WIDTH
        first, last = map(at, _interval(arm))
        line[first : last + 1] = "-" * (last + 1 - first)
        for value, mark in ((-arm["margin"], ":"), (arm["margin"], ":"), (0, "|"), (arm["gap"], "o")):
            line[at(value)] = mark
        lines.append(f"{name:{name_width}}  {''.join(line)}  {arm['verdict']}")
    return "\n".join(lines)


def _interval(arm: Mapping[str, Any]) -> tuple[float, float]:
    """Ends of the interval, or the gap where there is none."""
    return tuple(arm["gap"] if arm[end] is None else arm[end] for end in ("ci_low", "ci_high"))
