"""hqsweep.judge: verdicts on what another program trained, for Python and notebooks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from hqsweep.errors import UserError
from hqsweep.foreign_logs import judge as foreign
from hqsweep.foreign_logs import table
from hqsweep.foreign_logs.logs import Reading, frame_of, judge_files, judge_frame

Logs = Mapping[str, Any] | pd.DataFrame | str | Path


def judge(
    data: Logs,
    *,
    baseline: str | None = None,
    margin: float | str = foreign.MARGIN,
    metric: str | None = None,
    lower_is_better: bool | None = None,
    window: float | None = None,
    null_arm: str | None = None,
) -> "Judgement":
    """Judge arms in any metric: which are worse, better or equivalent.

    data             arm -> its values by seed, {"bf16": [2.31, 2.29], ...}, or arm -> {seed: value}; or a DataFrame
                     with columns arm, seed and the metric, and step, or trunk and point, where there are such; or
                     the path of logs
    baseline         the arm that the others are measured against; None: bf16
    margin           the largest gap that counts as none: a part of the baseline's mean ("0.25%"), or a number in the
                     metric's unit (0.002)
    metric           the column, or the name of the values; None: val_loss, or the only one
    lower_is_better  None: what the metric's name says
    window           with steps: values are means over the last steps (50), or the last part of a run (0.1); None:
                     the last value
    null_arm         an arm that repeats the baseline, which is a second control

    Raises UserError as `hqsweep judge` does. Runs that cannot be used are in Judgement.left_out.
    """
    question = foreign.Question(
        metric=metric or "", baseline=baseline, margin=margin, lower=lower_is_better, null_arm=null_arm
    )
    reading = Reading(columns={}, window=window)
    if isinstance(data, pd.DataFrame):
        return Judgement(judge_frame(data, question, reading))
    if isinstance(data, Mapping):
        question = replace(question, metric=metric or "value")
        return Judgement(judge_frame(frame_of(data, question.metric), question, reading))
    if isinstance(data, str | Path):
        return Judgement(judge_files([Path(data)], question, reading))
    raise UserError(f"judge: takes a dict, a DataFrame or the path of logs, not {type(data).__name__}")


class Judgement:
    """What hqsweep.judge returns."""

    def __init__(self, judgement: foreign.Judgement) -> None:
        self._judgement = judgement

    @property
    def baseline(self) -> str:
        """The arm that the others are measured against."""
        return self._judgement.baseline

    @property
    def headline(self) -> str:
        """What was judged, and each arm's sentence."""
        arms = self._judgement.arms.iloc[1:]
        return " ".join(
            [f"{table.title(self._judgement)}.", *(f"{row.arm}: {row.sentence}" for row in arms.itertuples())]
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on how values were made."""
        return self._judgement.notes

    @property
    def left_out(self) -> Sequence[str]:
        """Sentences on runs that do not enter."""
        return self._judgement.left_out

    @property
    def verdicts(self) -> pd.DataFrame:
        """One row an arm, the baseline first, then from the best to the worst: arm, verdict (better, worse, equivalent,
        undecided; baseline; or why there is none), gap, ci_low, ci_high, eq_low, eq_high, margin (all in `unit`), p, n,
        needed, more, mean (of the metric), sentence."""
        rows = self._judgement.arms.drop(columns="gap").rename(columns=foreign.IN_UNIT)
        return rows[["arm", "verdict", *foreign.IN_UNIT.values(), "p", "n", "needed", "more", "mean", "sentence"]]

    @property
    def unit(self) -> str:
        """The unit of gaps and margin: "% of the baseline's mean", or the name of the metric."""
        return self._judgement.of_unit

    def report(self, folder: str | Path) -> Path:
        """Write a report into a folder: HTML, Markdown, CSV and pictures; returns its page."""
        from hqsweep.foreign_logs.folder import write  # with plotly

        return write(self._judgement, Path(folder))

    @property
    def values(self) -> pd.DataFrame:
        """The values that entered: a row for each seed (or trunk and point), a column for each arm."""
        return self._judgement.values.copy()

    def __repr__(self) -> str:
        return f"<Judgement {self.headline}>"

    def _repr_html_(self) -> str:
        shown = table.arms_table(self._judgement)
        cells = pd.DataFrame(shown.rows, columns=list(shown.header)).to_html(index=False, border=0)
        return f"<p>{escape(self.headline)}</p>{cells}"
