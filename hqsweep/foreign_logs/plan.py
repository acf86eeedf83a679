"""The cost of a study in seeds, from the noise that logs of an earlier one show: `hqsweep plan --from LOGS`.

The noise is the standard deviation of one seed's gap (of forks: of one trunk's), as the verdict takes it. Logs of the
baseline alone have no gaps: two runs that share nothing differ by sqrt(2) standard deviations of one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hqsweep.errors import UserError
from hqsweep.foreign_logs.judge import Judgement, judge, parse_margin
from hqsweep.foreign_logs.logs import Log
from hqsweep.foreign_logs.values import lower_is_better
from hqsweep.report.compare.frames import FORK
from hqsweep.report.compare.verdict import PLAIN, spec
from hqsweep.report.pages.text import TextTable, number
from hqsweep.verdicts import plan as power


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What an arm needs.

    sd     standard deviation of one seed's (or trunk's) gap, in the plan's unit; NaN for fewer than two
    n      seeds or trunks that it comes from
    find   the fewest with which a gap of the plan's size is called worse (or better) in 4 of 5 studies; inf beyond 1000
    equal  the fewest with which an arm without a gap is called equivalent within that size in 4 of 5 studies
    """

    arm: str
    sd: float
    n: int
    find: float
    equal: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """size: the gap to find, in `unit`. arms: the number under test. notes: how the noise was found."""

    metric: str
    size: float
    unit: str
    design: str
    baseline: str
    arms: int
    rows: tuple[Noise, ...]
    notes: tuple[str, ...]

    @property
    def replicate(self) -> str:
        return "trunk" if self.design == FORK else "seed"

    @property
    def text(self) -> str:
        """The size with its unit."""
        return f"{self.size:g}" + (" %" if self.unit == "%" else "")

    def table(self) -> TextTable:
        """One row for each arm."""
        sign = " %" * (self.unit == "%")
        header = (
            "arm",
            f"sd{sign} of a {self.replicate}'s gap",
            "from",
            f"to find {self.text}",
            f"to show ±{self.text}",
        )
        rows = tuple((row.arm, self._sd(row.sd), str(row.n), _count(row.find), _count(row.equal)) for row in self.rows)
        return TextTable(header=header, rows=rows, numeric=frozenset({1, 2, 3, 4}))

    def _sd(self, sd: float) -> str:
        return number(sd, spec({"unit": PLAIN}, sd).replace("+", "")) if sd else "0"

    @property
    def sentence(self) -> str:
        """The count that is enough for all arms."""
        counts = [max(row.find, row.equal) for row in self.rows if not math.isnan(row.find)]
        if not counts:
            return f"two {self.replicate}s of an arm at least show noise; there is one"
        many = max(counts)
        if math.isinf(many):
            return f"no number of {self.replicate}s up to {power.MOST} decides {self.text} for every arm; ask for more"
        return f"{many:.0f} {self.replicate}s decide {self.text} for every arm, in 4 of 5 studies"


def plan(log: Log, size: str | float) -> Plan:
    """The plan for a gap of `size`, "0.25%" of the baseline's mean or a number in the metric's unit.

    Raises UserError as `judge`, but takes a log of the baseline alone.
    """
    amount, relative = parse_margin(size, "--resolve")
    question = replace(log.question, margin=size)
    if question.lower is None:
        question = replace(question, lower=_direction(question.metric))
    unit, arms = "%" if relative else PLAIN, list(dict.fromkeys(log.values.runs["arm"]))
    if len(arms) == 1 and question.baseline in (None, arms[0]):
        return _of_one_arm(log, arms[0], amount, unit)
    judgement = judge(log.values, question, forked=log.forked)
    null = judgement.arms["arm"][judgement.arms["null"]]
    under_test = [arm for arm in judgement.arms["arm"].iloc[1:] if arm not in set(null)]
    rows = tuple(_noise(judgement, arm, len(under_test), amount, null=len(null) > 0) for arm in under_test)
    return Plan(
        metric=question.metric, size=amount, unit=unit, design=judgement.design, baseline=judgement.baseline,
        arms=len(under_test), rows=rows, notes=(*judgement.notes, *judgement.left_out),
    )  # fmt: skip


def _direction(metric: str) -> bool:
    """Whether lower is better; a plan is the same for both, so that an unknown name is no fault."""
    try:
        return lower_is_better(metric)
    except UserError:
        return True


def _noise(judgement: Judgement, arm: str, arms: int, size: float, *, null: bool) -> Noise:
    estimate = judgement.estimates.get(arm)
    n = estimate.n if estimate else 0
    sd = estimate.se * math.sqrt(n) if estimate else math.nan
    design = power.DESIGNS[judgement.design == FORK]
    return Noise(arm=arm, sd=sd, n=n, **_counts(design, sd, arms, size, null=null))


def _counts(design: str, sd: float, arms: int, size: float, *, null: bool) -> dict[str, float]:
    if math.isnan(sd):
        return {"find": math.nan, "equal": math.nan}
    find = power.replicates(design, sd, arms, gap=size, null=null)
    return {"find": find, "equal": power.replicates(design, sd, arms, margin=size, null=null)}


def _of_one_arm(log: Log, arm: str, size: float, unit: str) -> Plan:
    """The plan of one arm against a baseline with the noise of this one."""
    if log.forked:
        raise UserError(
            f"baseline: '{arm}' is the only arm; the noise of forks is that of gaps, which takes another arm"
        )
    values = log.values.runs["value"].to_numpy()
    values = values[np.isfinite(values)]
    sd = math.sqrt(2) * float(values.std(ddof=1)) if len(values) > 1 else math.nan
    if unit == "%":
        if not (values > 0).all() and not (values < 0).all():
            raise UserError(
                "margin: a part of the baseline's mean says nothing where its values have both signs, or are 0; give a"
                " number in the metric's unit"
            )
        sd *= 100 / abs(float(values.mean()))
    row = Noise(arm=arm, sd=sd, n=len(values), **_counts("whole runs", sd, 1, size, null=False))
    note = f"{arm} is the only arm: runs of another one are taken to be as noisy, and to share nothing with its seeds"
    return Plan(
        metric=log.question.metric, size=size, unit=unit, design="whole run", baseline=arm, arms=1, rows=(row,),
        notes=(*log.values.notes, *log.values.left_out, note),
    )  # fmt: skip


def _count(count: float) -> str:
    return "-" if math.isnan(count) else "over 1000" if math.isinf(count) else f"{count:.0f}"


def document(planned: Plan) -> dict[str, Any]:
    """The plan for programs."""
    rows: Sequence[dict[str, Any]] = [vars(row) for row in planned.rows]
    unit = "% of the baseline's mean" if planned.unit == "%" else planned.metric
    return {
        "resolve": planned.size, "unit": unit, "metric": planned.metric, "design": planned.design,
        "baseline": planned.baseline, "arms": planned.arms, "noise": rows, "notes": list(planned.notes),
    }  # fmt: skip
