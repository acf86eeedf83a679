"""Families of arms that are judged together, and the runs that enter: what hqsweep.verdicts gets of the finished runs.

A family is a baseline, its null arm, and the arms under test; the 5 % of false claims are of all of its arms, also the
arms that have no result yet and may get one, so that the intervals of the others stay when they do.

Forks: every arm is judged on what it and the baseline have. A trunk enters when the arm's forks from it have ended, and
then a point that one of these trunks lacks is left out of all of them, because gaps at other points are other gaps.
Whole runs are judged together, on the seeds that finished in every arm; an arm that still runs, and lacks seeds of the
arm that has the most, waits.

An arm that diverged, that has no finished run, or that is the baseline again, is not judged. All of this is said in
`left_out`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from hqsweep.report.compare.frames import DECIDES, FORK, LOSSES
from hqsweep.report.compare.verdict import IDENTICAL
from hqsweep.verdicts import judging
from hqsweep.verdicts.estimate import Estimate
from hqsweep.verdicts.judging import Weights, weights

ENDED = ("diverged", IDENTICAL)
"""Why an arm is not judged, whatever its other runs do."""
OPEN = ("pending", "running", "interrupted")
"""The states of runs that may yet finish."""
NAMED = 3
"""The trunks without a result that a sentence names; of more it says the number alone."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a family is judged: margin in % of the baseline's loss; maximum is the number of replicates up to which a
    sequential study looks after each, None for a study of a fixed size."""

    design: str
    margin: float
    maximum: int | None = None
    identical: Collection[str] = ()
    """Arms that are their baseline again (report.compare.identical), which leave the family."""
    end: int | None = None
    """The step at which all forks end, where they do so together (frames.common_end): the gap of a whole run of as many
    steps decides then, which forks of several ages show (verdicts.judging); else the mean over the points does."""


Interval = tuple[float, float, float]
"""A mean with the ends of its interval."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What came of a family.

    estimates  arm -> the estimate of the loss that decides, in % of the baseline's loss
    beside     arm -> the estimate by the other loss, which decides nothing
    these      arm -> 95 % interval in % that covers these trunks at these points alone (forks); NaN for one point, and
               for forks that end together
    points     one row per arm, replicate and point that entered: arm, trunk, seed, point, draw, then gap (nats) and
               gap_pct of the loss that decides, val_gap, val_gap_pct, train_gap, train_gap_pct, and weight (of this
               point in the trunk's gap)
    parts      arm -> at once and growth, (mean, low, high) each: the part of the gap that comes with the switch, in %,
               and what 100 steps since the fork add to it (forks that end together)
    apart      arm -> why it has no estimate: identical (to the baseline), diverged, failed, unfinished, waiting (for
               seeds that other arms have finished) or unpaired
    together   the arms under test whose intervals hold together
    losses     arm -> the baseline's mean over the arm's own rows, in nats, of the loss that decides; the baseline's own
               is over all rows that entered
    correlations  arm -> the correlation of its losses with the baseline's, over three seeds or more (whole runs)
    left_out   sentences about what did not enter
    """

    design: str
    baseline: str
    null: str | None
    estimates: dict[str, Estimate]
    beside: dict[str, Estimate]
    these: dict[str, tuple[float, float]]
    points: pd.DataFrame
    apart: dict[str, str]
    parts: dict[str, dict[str, Interval]] = field(default_factory=dict)
    together: int = 1
    losses: dict[str, float] = field(default_factory=dict)
    correlations: dict[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def of_loss(self, loss: str) -> dict[str, Estimate]:
        """The estimates of "val" or "train"."""
        return self.estimates if loss == DECIDES[self.design] else self.beside


def judge(finals: pd.DataFrame, baseline: str, null: str | None, rule: Rule) -> Family:
    """The family of `finals`, the rows of curves.measures of its arms, baseline and null arm among them."""
    arms = [arm for arm in finals["arm"].unique() if arm != baseline]
    apart = _apart(finals, arms, rule.identical)
    table = _table(finals, rule.design)
    candidates = [arm for arm in arms if arm not in apart]
    done = table[LOSSES[DECIDES[rule.design]]].reindex(columns=[baseline, *candidates]).notna()
    choose = _of_forks if rule.design == FORK else _of_seeds
    entering, lacking, left_out = choose(done, finals, baseline, [arm for arm in arms if apart.get(arm) not in ENDED])
    apart |= {arm: lacking.get(arm, "unpaired") for arm in candidates if arm not in entering}
    if not entering:
        nothing = pd.DataFrame(columns=["arm", "trunk", "seed", "point", "draw", *_gap_columns(), "weight"])
        return Family(
            design=rule.design, baseline=baseline, null=null, estimates={}, beside={}, these={}, points=nothing,
            apart=apart, left_out=left_out,
        )  # fmt: skip
    here = null if null in entering else None
    rows = done.index[np.logical_or.reduce([done.index.isin(own) for own in entering.values()])]
    of_loss = {loss: table[LOSSES[loss]].loc[rows] for loss in LOSSES}
    controls = [baseline] if here is None or rule.design == FORK else [baseline, here]
    gaps = {loss: _gaps(of_loss[loss], entering, here, controls) for loss in LOSSES}
    percent = {loss: _percent(gaps[loss], of_loss[loss][baseline], rule.design) for loss in LOSSES}
    decides = DECIDES[rule.design]
    (other,) = set(LOSSES) - {decides}
    family = [arm for arm in arms if arm in entering or (apart[arm] not in ENDED and _open(finals, arm, baseline))]
    study = _Study(baseline=baseline, null=here, rule=rule, arms=sum(arm != null for arm in family))
    estimates, beside = (_estimates(of_loss[loss], percent[loss], entering, study) for loss in (decides, other))
    these, correlations, parts = {}, {}, {}
    if rule.design == FORK:
        own = {arm: _whole(percent[decides][arm].loc[entering[arm]], rule) for arm in entering}
        these = judging.these_forks(own, null=here, arms=study.arms)
        parts = {arm: _parts(percent[decides][arm].loc[entering[arm]], rule, one) for arm, one in estimates.items()}
    elif len(rows) > 2:
        correlations = of_loss[decides][[*entering]].corrwith(of_loss[decides][baseline]).to_dict()
    level = of_loss[decides][baseline]
    return Family(
        design=rule.design, baseline=baseline, null=null, estimates=estimates, beside=beside, these=these,
        points=_points(finals, gaps, percent, decides, rule), apart=apart, parts=parts, correlations=correlations,
        left_out=left_out, together=max(1, study.arms),
        losses={baseline: float(level.mean()), **{arm: float(level[entering[arm]].mean()) for arm in entering}},
    )  # fmt: skip


def _apart(finals: pd.DataFrame, arms: Sequence[str], identical: Collection[str]) -> dict[str, str]:
    """Arms without an estimate, whatever the others did."""
    apart = {}
    for arm in arms:
        rows = finals[finals["arm"] == arm]
        if rows["diverged_at"].notna().any():
            apart[arm] = "diverged"
        elif rows["final_loss"].isna().all():
            apart[arm] = "failed" if rows["state"].isin(["failed", "finished"]).any() else "unfinished"
        elif arm in identical:
            apart[arm] = IDENTICAL
    return apart


def _table(finals: pd.DataFrame, design: str) -> pd.DataFrame:
    """Losses by replicate and draw: index (seed of the replicate, trunk, draw, seed), columns (loss, arm), in the order
    in which replicates came: by seed."""
    first = finals.groupby("trunk")["seed"].transform("min")
    keyed = finals.assign(order=first)
    if design == FORK:
        broken = keyed["train_loss"].isna() | keyed["final_loss"].isna()
        keyed.loc[broken, list(LOSSES.values())] = np.nan
    return keyed.pivot(index=["order", "trunk", "point", "draw", "seed"], columns="arm", values=[*LOSSES.values()])


def _open(finals: pd.DataFrame, arm: str, baseline: str) -> bool:
    """Whether a run of the arm or of its baseline may yet finish."""
    return bool(finals["state"][finals["arm"].isin([arm, baseline])].isin(OPEN).any())


Chosen = tuple[dict[str, pd.Index], dict[str, str], tuple[str, ...]]
"""Arm -> its rows that enter, of arms that have some; arm -> why it has none, where that is not "unpaired"; sentences
on what is left out."""


def _of_seeds(done: pd.DataFrame, finals: pd.DataFrame, baseline: str, arms: Sequence[str]) -> Chosen:
    """The seeds that finished in every arm. An arm that still runs waits while it lacks a seed of the arm with the
    most. `done`: whether each replicate of the arms and the baseline has its loss; `arms`: all that may have one."""
    shared = {arm: done[arm] & done[baseline] for arm in done.columns if arm != baseline}
    together = [arm for arm, rows in shared.items() if rows.any()]
    if not together:
        return {}, {}, ()
    most = shared[max(together, key=lambda arm: int(shared[arm].sum()))]
    running = set(finals["arm"][finals["state"].isin(OPEN)])
    nothing = most & False
    lacking = {arm: "waiting" for arm in arms if arm in running and (most & ~shared.get(arm, nothing)).any()}
    together = [arm for arm in together if arm not in lacking]
    while not (full := done[[baseline, *together]].all(axis=1)).any():
        together.remove(min(reversed(together), key=lambda arm: int(shared[arm].sum())))
    missing = sorted(set(done.index.get_level_values("seed")[~full]))
    said = [f"{listed('seed', missing)} did not finish in every arm and enters no gap."] if missing else []
    counts = {arm: int(shared.get(arm, nothing).sum()) for arm in lacking}
    said += [f"{arm}: {count} of {most.sum()} seeds; no gap before it has them all." for arm, count in counts.items()]
    return dict.fromkeys(together, full.index[full]), lacking, tuple(said)


def _of_forks(done: pd.DataFrame, finals: pd.DataFrame, baseline: str, arms: Sequence[str]) -> Chosen:
    """Every arm's own trunks and points, and what it lacks of them; `arms`: all that may have some."""
    entering, lacks = {}, {}
    for arm in arms:
        own = finals[finals["arm"].isin([arm, baseline])]
        if arm in done and (full := done[arm] & done[baseline]).any():
            entering[arm] = balanced(full, set(own["trunk"][own["state"].isin(OPEN)]))
        if text := _missing(own, entering.get(arm, done.index[:0])):
            lacks.setdefault(text, []).append(arm)
    return entering, {}, tuple(f"{', '.join(lacking)}: {text}." for text, lacking in lacks.items())


def balanced(full: pd.Series, waiting: set[str]) -> pd.Index:
    """The rows of the trunks whose forks have ended, at the points that all of these have; without a common point the
    trunks with the fewest are left out, until there is one. `full`: which rows an arm and its baseline have."""
    have = {trunk: list(part.index.get_level_values("draw")) for trunk, part in full[full].groupby("trunk", sort=False)}
    trunks = [trunk for trunk in have if trunk not in waiting] or list(have)
    while not (common := set.intersection(*(set(have[trunk]) for trunk in trunks))):
        trunks.remove(min(reversed(trunks), key=lambda trunk: len(have[trunk])))
    rows = full.index[full]
    return rows[rows.get_level_values("trunk").isin(trunks) & rows.get_level_values("draw").isin(common)]


def _missing(own: pd.DataFrame, entering: pd.Index) -> str:
    """The trunks and points that do not enter, such as "1 of 3 trunks; the point 200 lacks forks"; "" for none. `own`:
    the rows of finals of an arm and its baseline."""
    trunks, draws = own["trunk"].unique(), own.sort_values("point", kind="stable")["draw"].unique()
    out = [trunk for trunk in trunks if trunk not in entering.get_level_values("trunk")]
    points = [draw for draw in draws if len(entering) and draw not in entering.get_level_values("draw")]
    said = []
    if out:
        names = f" (without {' and '.join(out)})" if len(out) <= NAMED and len(entering) else ""
        said.append(f"{len(trunks) - len(out)} of {len(trunks)} trunks{names}")
    if points:
        several = len(points) > 1
        said.append(f"the point{'s' * several} {' and '.join(points)} lack{'s' * (not several)} forks")
    return "; ".join(said)


def listed(noun: str, names: Sequence[object]) -> str:
    """ "Seed 2", "Each of the seeds 2 and 4"."""
    if len(names) == 1:
        return f"{noun.capitalize()} {names[0]}"
    return f"Each of the {noun}s {', '.join(map(str, names[:-1]))} and {names[-1]}"


def _gaps(
    losses: pd.DataFrame, entering: Mapping[str, pd.Index], null: str | None, controls: Sequence[str]
) -> pd.DataFrame:
    """Gap in nats of each arm in each row of `losses` that is its own, NaN in the others: to the mean of the controls,
    baseline first; the null arm's to the baseline."""
    against = losses[list(controls)].mean(axis=1, skipna=False)
    gaps = {arm: losses[arm] - (losses[controls[0]] if arm == null else against) for arm in entering}
    return pd.DataFrame({arm: gap.where(gap.index.isin(entering[arm])) for arm, gap in gaps.items()})


def _percent(gaps: pd.DataFrame, baseline: pd.Series, design: str) -> pd.DataFrame:
    """Gaps in % of the baseline's loss: at that fork, or its mean over seeds."""
    return 100 * gaps.div(baseline if design == FORK else pd.Series(baseline.mean(), baseline.index), axis=0)


def _by_trunk(gaps: pd.Series) -> np.ndarray:
    """[trunks, points] of a column of balanced gaps."""
    return gaps.to_numpy().reshape(gaps.index.get_level_values("trunk").nunique(), -1)


def _ages(points: Iterable[int], rule: Rule) -> Weights | None:
    """The weights of a trunk's points, in their order; None where the mean over them decides."""
    steps = [int(point) for point in points]
    if rule.end is None or len(set(steps)) < 2:
        return None
    return weights([rule.end - point for point in steps], rule.end)


def _points_of(index: pd.Index) -> list[int]:
    """The points of the rows of one trunk."""
    first = index.get_level_values("trunk") == index.get_level_values("trunk")[0]
    return list(index.get_level_values("point")[first])


def _whole(gaps: pd.Series, rule: Rule) -> np.ndarray:
    """[trunks, points], or [trunks, 1] where forks end together: the gap of a whole run."""
    by_trunk, ages = _by_trunk(gaps), _ages(_points_of(gaps.index), rule)
    return by_trunk if ages is None else (by_trunk @ ages.whole)[:, None]


def _parts(gaps: pd.Series, rule: Rule, estimate: Estimate) -> dict[str, Interval]:
    """Family.parts of an arm. Both intervals have as many standard errors as the estimate's."""
    ages = _ages(_points_of(gaps.index), rule)
    if ages is None:
        return {}
    errors = (estimate.ci_high - estimate.gap) / estimate.se if estimate.se > 0 else np.nan
    found = {}
    for name, sums in (("at_once", _by_trunk(gaps) @ ages.at_once), ("growth", 100 * _by_trunk(gaps) @ ages.growth)):
        half = errors * sums.std(ddof=1) / len(sums) ** 0.5 if len(sums) > 1 else np.nan
        found[name] = float(sums.mean()), float(sums.mean() - half), float(sums.mean() + half)
    return found


@dataclass(frozen=True, kw_only=True)
class _Study:
    """How the arms of a family are judged; arms: the arms under test whose intervals hold together."""

    baseline: str
    null: str | None
    rule: Rule
    arms: int


def _estimates(
    losses: pd.DataFrame, percent: pd.DataFrame, entering: Mapping[str, pd.Index], study: _Study
) -> dict[str, Estimate]:
    """arm -> its estimate in %; {} where a loss is missing. The null arm is asked for equivalence alone: where it is
    within the margin, a gap of it that is resolved is no verdict."""
    own = {arm: percent[arm].loc[rows] for arm, rows in entering.items()}
    if any(gaps.isna().any() for gaps in own.values()):
        return {}
    null, options = study.null, {"margin": study.rule.margin, "maximum": study.rule.maximum}
    if study.rule.design == FORK:
        by_trunk = {arm: _whole(gaps, study.rule) for arm, gaps in own.items()}
        estimates = judging.judge_forks(by_trunk, null=null, arms=study.arms, **options)
    else:
        scaled = 100 * losses[[study.baseline, *own]] / losses[study.baseline].mean()
        columns = {arm: scaled[arm].to_numpy() for arm in scaled}
        waiting = study.arms - sum(arm != null for arm in own)
        estimates = judging.judge_whole_runs(columns, baseline=study.baseline, null=null, waiting=waiting, **options)
    if null and estimates[null].within_margin:
        estimates[null] = replace(estimates[null], worse=False, better=False)
    return estimates


def parts_of(family: Family, arm: str) -> dict[str, float]:
    """The cells of Family.parts in a row of Comparison.arms, NaN where an arm has none."""
    nothing = (np.nan,) * 3
    return {
        f"{name}_{cell}": value
        for name in ("at_once", "growth")
        for cell, value in zip(("pct", "low", "high"), family.parts.get(arm, {}).get(name, nothing), strict=True)
    }


def _gap_columns() -> list[str]:
    return ["gap", "gap_pct", *(f"{loss}_{kind}" for loss in LOSSES for kind in ("gap", "gap_pct"))]


def _points(
    finals: pd.DataFrame,
    gaps: Mapping[str, pd.DataFrame],
    percent: Mapping[str, pd.DataFrame],
    decides: str,
    rule: Rule,
) -> pd.DataFrame:
    """Family.points."""
    parts = {}
    for loss in LOSSES:
        parts |= {f"{loss}_gap": gaps[loss], f"{loss}_gap_pct": percent[loss]}
    parts = {"gap": gaps[decides], "gap_pct": percent[decides]} | parts
    long = pd.DataFrame(
        {name: frame.rename_axis(columns="arm").stack(future_stack=True) for name, frame in parts.items()}
    )
    rows = long.dropna(subset="gap").reset_index().drop(columns="order")
    order = {arm: place for place, arm in enumerate(finals["arm"].unique())}
    rows = rows.sort_values("arm", key=lambda arms: arms.map(order), kind="stable", ignore_index=True)
    rows["weight"] = rows.groupby(["arm", "trunk"], sort=False)["point"].transform(lambda points: _weight(points, rule))
    return rows[["arm", "trunk", "seed", "point", "draw", *_gap_columns(), "weight"]]


def _weight(points: pd.Series, rule: Rule) -> np.ndarray:
    """The weights of one trunk's points; they sum to 1."""
    ages = _ages(points, rule)
    return np.full(len(points), 1 / len(points)) if ages is None else ages.whole
