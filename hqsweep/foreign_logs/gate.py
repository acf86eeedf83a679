"""The gate for logs of other programs: what they say now against values that `hqsweep judge --store` has stored.

The file, which is kept in git, has the question (metric, direction, baseline, margin), how logs are read, and a value
for each run as hex float. The rules are report.gate's: a change of an arm's gap is judged as a gap is, of the baseline
its own value, and equal values pass. A run that was finite and ends at nan or inf is a regression.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from hqsweep.config.safe import loads
from hqsweep.errors import UserError
from hqsweep.foreign_logs.judge import Judgement, Question, parse_margin
from hqsweep.foreign_logs.logs import Reading, judge_log, log_of
from hqsweep.foreign_logs.values import several
from hqsweep.report.compare.frames import FORK
from hqsweep.report.compare.verdict import PLAIN, spec
from hqsweep.report.gate.baseline import sealed
from hqsweep.report.gate.change import Family, changes_of, judge
from hqsweep.report.gate.verdict import Verdict, Verdicts
from hqsweep.sweep.store.files import write_json
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.verdicts.estimate import Estimate

VERSION = 1
KIND = "values of logs"
STORE = "hqsweep judge LOGS --store FILE"
Key = tuple[str, str, str]
"""arm, seed or trunk, fork point ("" without one)."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What a baseline file has: the question, the reading and the value of each run, in the order of the file."""

    path: Path
    question: Question
    reading: Reading
    values: Mapping[Key, float]


class PlainVerdicts(Verdicts):
    """Verdicts whose margin and changes are in the metric's own unit."""

    SIGN = ""

    def places(self, half: float) -> str:
        return spec({"unit": PLAIN}, half)


def store(judgement: Judgement, question: Question, reading: Reading, path: Path) -> None:
    """Write the values of a judgement, and how they came about, into a baseline file. Raises UserError where a run has
    no finite value, or is left out."""
    runs = judgement.runs
    if judgement.left_out:
        raise UserError(f"{path} was not written: {judgement.left_out[0]}")
    if broken := [f"'{run.arm}' {run.replicate}" for run in runs.itertuples() if not math.isfinite(run.value)]:
        raise UserError(f"{path} was not written: no finite value in {several(broken)}")
    nulls = judgement.arms["arm"][judgement.arms["null"]]
    document = {
        "version": VERSION,
        "kind": KIND,
        "metric": judgement.metric,
        "lower_is_better": judgement.lower,
        "baseline": judgement.baseline,
        "null_arm": nulls.iloc[0] if len(nulls) else None,
        "margin": str(question.margin),
        "columns": {what: name for what, name in reading.columns.items() if name},
        "window": reading.window,
        "any_length": reading.any_length,
        "runs": [
            {"arm": run.arm, "replicate": run.replicate, "draw": run.draw, "value": float(run.value).hex()}
            for run in runs.itertuples()
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, sealed(document))


def store_runs(runs: Sequence[RunDir], path: Path) -> None:
    """Write the values of runs of commands into a baseline file, as store() does."""
    log = log_of(runs)
    reading = Reading(columns={}, window=log.window)
    store(judge_log(log), log.question, reading, path)


def is_stored(path: Path) -> bool:
    """Whether a file is a baseline of this kind, and not of hqsweep's own runs."""
    try:
        document = loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("kind") == KIND


def read_stored(path: Path) -> Stored:
    """The content of a baseline file. Raises UserError with the reason for an unusable one."""
    again = f"store it anew with `{STORE}`"
    try:
        document = loads(path.read_bytes())
        if document["kind"] != KIND or document["version"] != VERSION:
            raise UserError(f"{path}: a baseline of another kind or version; {again}")
        if sealed(document)["sha256"] != document["sha256"]:
            raise UserError(f"{path}: contradicts its own hash, so it was edited; {again}")
        question = Question(
            metric=document["metric"], baseline=document["baseline"], margin=document["margin"],
            lower=document["lower_is_better"], null_arm=document["null_arm"],
        )  # fmt: skip
        reading = Reading(
            columns=document["columns"], window=document["window"], any_length=document["any_length"]
        )  # fmt: skip
        rows = {(run["arm"], run["replicate"], run["draw"]): float.fromhex(run["value"]) for run in document["runs"]}
        return Stored(path=path, question=question, reading=reading, values=rows)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no baseline file; {again}") from None
    except UserError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: not a baseline file ({type(error).__name__}: {error}); {again}") from None


def gate(judgement: Judgement, stored: Stored) -> Verdicts:
    """The verdict on every arm of either side, within the stored margin."""
    size, relative = parse_margin(stored.question.margin)
    now = {(run.arm, run.replicate, run.draw): run.value for run in judgement.runs.itertuples()}
    held = Held(judgement=judgement, stored=stored, now=now, margin=size, relative=relative)
    arms = dict.fromkeys([*judgement.arms["arm"], *(arm for arm, *_ in stored.values)])
    kind = Verdicts if relative else PlainVerdicts
    estimates = held.estimates()
    unit = "trunks" if judgement.design == FORK else "seeds"
    return kind(arms=tuple(held.verdict(arm, estimates.get(arm)) for arm in arms), replicates=unit, margin=size)


@dataclass(frozen=True, kw_only=True)
class Held:
    """A judgement and the stored values that it is held against. now: the value of each of its runs."""

    judgement: Judgement
    stored: Stored
    now: Mapping[Key, float]
    margin: float
    relative: bool

    def pairs(self, arm: str) -> dict[Key, tuple[float, float]]:
        """Each run of an arm that is on both sides -> its value now and the stored one."""
        return {
            key: (self.now[key], old) for key, old in self.stored.values.items() if key[0] == arm and key in self.now
        }

    def equal(self, arm: str) -> bool:
        """Whether all runs on both sides have equal values."""
        pairs = self.pairs(arm)
        return bool(pairs) and all(now == old for now, old in pairs.values())

    def estimates(self) -> dict[str, Estimate]:
        """Arm -> the change that can be judged, in % of the stored mean of the baseline or in the metric's unit."""
        finite = {key: old for key, old in self.stored.values.items() if math.isfinite(self.now.get(key, math.nan))}
        sign = 1 if self.judgement.lower else -1
        rows = changes_of(
            ((arm, replicate, draw or "0"), sign * (self.now[arm, replicate, draw] - old), self._level(old))
            for (arm, replicate, draw), old in finite.items()
        )
        baseline, null = self.stored.question.baseline, self.stored.question.null_arm
        there = set(rows["arm"])
        if baseline not in there:
            return {}
        null = null if null in there else None
        arms = [arm for arm in dict.fromkeys(rows["arm"]) if arm not in (baseline, null) and not self.equal(arm)]
        together = self._in_common(rows, [baseline, *arms, *([null] if null else [])])
        judged = judge(rows, Family(arms=together, baseline=baseline, null=null), self.judgement.design, self.margin)
        return judged if self.judgement.lower else {arm: turned(each) for arm, each in judged.items()}

    def _level(self, old: float) -> float:
        """What 100 % of a change are: a stored value, or the metric's own unit."""
        return abs(old) if self.relative else 100.0

    def _in_common(self, rows: pd.DataFrame, arms: Iterable[str]) -> list[str]:
        """The arms under test that share a run's place with the baseline."""
        places = {arm: set(zip(own["trunk"], own["draw"], strict=True)) for arm, own in rows.groupby("arm")}
        controls = (self.stored.question.baseline, self.stored.question.null_arm)
        return [arm for arm in arms if arm not in controls and places[arm] & places[controls[0]]]

    def verdict(self, arm: str, estimate: Estimate | None) -> Verdict:
        """The verdict of one arm, which may be on either side only."""
        stored = [key for key in self.stored.values if key[0] == arm]
        absent = [f"{_where(key)} is not in these logs" for key in stored if key not in self.now]
        broken = [f"{_where(key)} has no finite value" for key in stored if not math.isfinite(self.now.get(key, 0.0))]
        notes, fields = [*broken, *absent], {}
        if self.equal(arm):
            count = len({replicate for _, replicate, _ in self.pairs(arm)})
            notes.append("equal in every digit")
            fields = {"gap": 0.0, "ci_low": 0.0, "ci_high": 0.0, "n": count, "within_margin": True, "bitwise": True}
            fields["verdict"] = outcome = "equivalent"
        elif estimate is None:
            outcome = "undecided" if stored else "new"
            notes += [] if stored else [f"not in {self.stored.path.name}; `{STORE}` stores it"]
        else:
            taken = ("verdict", "gap", "ci_low", "ci_high", "n", "within_margin", "needed")
            fields, outcome = {name: getattr(estimate, name) for name in taken}, estimate.verdict
            notes.append(self._reason(estimate))
        outcome = {"equivalent": "pass", "better": "pass", "worse": "regression"}.get(outcome, outcome)
        if outcome == "regression" and estimate.within_margin:
            outcome = "pass"
        outcome = "regression" if broken else "missing" if absent else outcome
        return Verdict(arm=arm, outcome=outcome, margin=self.margin, note="; ".join(filter(None, notes)), **fields)

    def _reason(self, estimate: Estimate) -> str:
        """What the estimate lacks, or allows."""
        margin = f"the margin of {self.margin:g}{' %' if self.relative else ''}"
        if estimate.verdict in ("worse", "better"):
            return f"{estimate.verdict} than stored" + f", but inside {margin}" * estimate.within_margin
        if estimate.verdict == "equivalent":
            return f"inside {margin}"
        unit = "trunks" if self.judgement.design == FORK else "seeds"
        more = estimate.needed - estimate.n
        if math.isinf(more):
            return f"no number of {unit} within reach would decide; raise {margin}"
        return f"{'more' if math.isnan(more) else f'about {more:.0f} more'} {unit} would decide"


def turned(estimate: Estimate) -> Estimate:
    """The estimate of a metric that is better when higher, from an estimate with the opposite sign."""
    return replace(
        estimate, gap=-estimate.gap, ci_low=-estimate.ci_high, ci_high=-estimate.ci_low, eq_low=-estimate.eq_high,
        eq_high=-estimate.eq_low,
    )  # fmt: skip


def _where(key: Key) -> str:
    _, replicate, draw = key
    return f"trunk {replicate} at {draw}" if draw else f"seed {replicate}"


def unit_of(stored: Stored) -> str:
    """The unit of margin and changes."""
    _, relative = parse_margin(stored.question.margin)
    return "% of the stored mean of the baseline" if relative else stored.question.metric
