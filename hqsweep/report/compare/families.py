"""Families of arms that are judged together, and the runs that enter: what hqsweep.verdicts gets of the finished runs.

A family is a baseline, its null arm, and the arms under test; the 5 % of false claims are of all of its arms. Whole
runs: only seeds that finished in every arm of the family enter. Forks: a trunk enters when its forks have ended, and
then a point that one of them lacks is left out in every trunk, because gaps at other points are other gaps. An arm
that diverged, that has no finished run, or that is the baseline again, leaves the family. All of this is said in
`left_out`.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from hqsweep.report.compare.frames import FORK
from hqsweep.report.compare.identical import IDENTICAL
from hqsweep.verdicts import forks, whole_runs
from hqsweep.verdicts.estimate import Estimate

DECIDES = {"whole run": "val", "fork": "train"}
"""Design -> the loss whose gap decides: final val_loss, or train_loss over the decay (the same fresh batches in every
arm, and the quieter one)."""
LOSSES = {"val": "final_loss", "train": "train_loss"}
"""Loss -> its column in the rows of curves.measures."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How a family is judged: margin in % of the baseline's loss; maximum is the number of replicates up to which a
    sequential study looks after each, None for a study of a fixed size."""

    design: str
    margin: float
    maximum: int | None = None
    identical: Collection[str] = ()
    """Arms that are their baseline again (report.compare.identical), which leave the family."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What came of a family.

    estimates  arm -> the estimate of the loss that decides, in % of the baseline's loss
    beside     arm -> the estimate by the other loss, which decides nothing
    these      arm -> 95 % interval in % that covers these trunks at these points alone (forks)
    points     one row per arm, replicate and point that entered: arm, trunk, seed, point, draw, then gap (nats) and
               gap_pct of the loss that decides, val_gap, val_gap_pct, train_gap, train_gap_pct
    apart      arm -> why it has no estimate: identical (to the baseline), diverged, failed, unfinished or unpaired
    loss       the baseline's mean over what entered, in nats, of the loss that decides; NaN where nothing did
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
    loss: float = math.nan
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
    entering, unpaired, left_out = _entering(table, finals, baseline, [arm for arm in arms if arm not in apart], rule)
    apart |= dict.fromkeys(unpaired, "unpaired")
    judged = [arm for arm in arms if arm not in apart]
    here = null if null in judged else None
    if entering.empty or not judged:
        nothing = pd.DataFrame(columns=["arm", "trunk", "seed", "point", "draw", *_gap_columns()])
        apart |= dict.fromkeys(judged, "unpaired")
        return Family(
            design=rule.design, baseline=baseline, null=null, estimates={}, beside={}, these={}, points=nothing,
            apart=apart, left_out=left_out,
        )  # fmt: skip
    of_loss = {loss: table[LOSSES[loss]].loc[entering] for loss in LOSSES}
    controls = [baseline] if here is None or rule.design == FORK else [baseline, here]
    gaps = {loss: _gaps(of_loss[loss], judged, here, controls) for loss in LOSSES}
    percent = {loss: _percent(gaps[loss], of_loss[loss][baseline], rule.design) for loss in LOSSES}
    decides = DECIDES[rule.design]
    (other,) = set(LOSSES) - {decides}
    estimates, beside = (_estimates(of_loss[loss], percent[loss], baseline, here, rule) for loss in (decides, other))
    these, correlations = {}, {}
    if rule.design == FORK:
        these = forks.these_forks({arm: _by_trunk(percent[decides][arm]) for arm in judged}, null=here)
    elif len(entering) > 2:
        correlations = of_loss[decides][judged].corrwith(of_loss[decides][baseline]).to_dict()
    return Family(
        design=rule.design, baseline=baseline, null=null, estimates=estimates, beside=beside, these=these,
        points=_points(finals, gaps, percent, decides), apart=apart, loss=float(of_loss[decides][baseline].mean()),
        correlations=correlations, left_out=left_out,
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


def _entering(
    table: pd.DataFrame, finals: pd.DataFrame, baseline: str, arms: Sequence[str], rule: Rule
) -> tuple[pd.Index, list[str], tuple[str, ...]]:
    """(rows of `table` that enter, arms that share no row with the others, a sentence on rows left out)."""
    done = table[LOSSES[DECIDES[rule.design]]].reindex(columns=[baseline, *arms]).notna()
    full, unpaired = shared(done, baseline, arms)
    if not full.any():
        return table.index[:0], unpaired, ()
    if rule.design == FORK:
        family = finals[finals["arm"].isin({baseline, *arms} - {*unpaired})]
        rows, left_out = balanced(full, _waiting(family))
        return rows, unpaired, left_out
    missing = sorted(set(done.index.get_level_values("seed")[~full]))
    said = (f"{listed('seed', missing)} did not finish in every arm and enters no gap.",) if missing else ()
    return full.index[full], unpaired, said


def shared(done: pd.DataFrame, baseline: str, arms: Sequence[str]) -> tuple[pd.Series, list[str]]:
    """(the rows that all arms have, as booleans; the arms that are left out for it). `done` has a column for each arm.

    An arm is left out if it shares no row with the baseline; without a common row, also the arm that shares the fewest,
    until there is one."""
    unpaired = [arm for arm in arms if not (done[arm] & done[baseline]).any()]
    together = [arm for arm in arms if arm not in unpaired]
    while together and not done[[baseline, *together]].all(axis=1).any():
        fewest = min(reversed(together), key=lambda arm: int((done[arm] & done[baseline]).sum()))
        unpaired.append(fewest)
        together.remove(fewest)
    return done[[baseline, *together]].all(axis=1) & bool(together), unpaired


def _waiting(finals: pd.DataFrame) -> set[str]:
    """Trunks with forks that may yet finish."""
    return set(finals["trunk"][finals["state"].isin(["pending", "running", "interrupted"])])


def balanced(full: pd.Series, waiting: Collection[str] = ()) -> tuple[pd.Index, tuple[str, ...]]:
    """The rows of the trunks whose forks have ended, at the points that all of these have; without a common point the
    trunks with the fewest are left out, until there is one. `full`: which rows every arm has."""
    have = {trunk: list(part.index.get_level_values("draw")) for trunk, part in full[full].groupby("trunk", sort=False)}
    trunks = [trunk for trunk in have if trunk not in waiting] or list(have)
    while not (common := set.intersection(*(set(have[trunk]) for trunk in trunks))):
        trunks.remove(min(reversed(trunks), key=lambda trunk: len(have[trunk])))
    levels = full.index
    enters = levels.get_level_values("trunk").isin(trunks) & levels.get_level_values("draw").isin(common)
    out_trunks = [trunk for trunk in dict.fromkeys(levels.get_level_values("trunk")) if trunk not in trunks]
    out_points = [draw for draw in dict.fromkeys(levels.get_level_values("draw")) if draw not in common]
    said = [f"{listed('trunk', out_trunks)} lacks forks and enters no gap."] if out_trunks else []
    if out_points:
        said.append(f"{listed('point', out_points)} is left out of every trunk, as a fork there has no result.")
    return levels[enters & full.to_numpy()], tuple(said)


def listed(noun: str, names: Sequence[object]) -> str:
    """ "Seed 2", "Each of the seeds 2 and 4"."""
    if len(names) == 1:
        return f"{noun.capitalize()} {names[0]}"
    return f"Each of the {noun}s {', '.join(map(str, names[:-1]))} and {names[-1]}"


def _gaps(losses: pd.DataFrame, arms: Sequence[str], null: str | None, controls: Sequence[str]) -> pd.DataFrame:
    """Gap in nats of each arm in each row of `losses`: to the mean of the controls, baseline first; the null arm's to
    the baseline."""
    against = losses[list(controls)].mean(axis=1, skipna=False)
    return pd.DataFrame({arm: losses[arm] - (losses[controls[0]] if arm == null else against) for arm in arms})


def _percent(gaps: pd.DataFrame, baseline: pd.Series, design: str) -> pd.DataFrame:
    """Gaps in % of the baseline's loss: at that fork, or its mean over seeds."""
    return 100 * gaps.div(baseline if design == FORK else pd.Series(baseline.mean(), baseline.index), axis=0)


def _by_trunk(gaps: pd.Series) -> np.ndarray:
    """[trunks, points] of a column of balanced gaps."""
    return gaps.to_numpy().reshape(gaps.index.get_level_values("trunk").nunique(), -1)


def _estimates(
    losses: pd.DataFrame, percent: pd.DataFrame, baseline: str, null: str | None, rule: Rule
) -> dict[str, Estimate]:
    """arm -> its estimate in %; {} where a loss is missing. The null arm is asked for equivalence alone: where it is
    within the margin, a gap of it that is resolved is no verdict."""
    if percent.isna().any(axis=None):
        return {}
    options = {"null": null, "margin": rule.margin, "maximum": rule.maximum}
    if rule.design == FORK:
        estimates = forks.judge({arm: _by_trunk(percent[arm]) for arm in percent}, **options)
    else:
        scaled = 100 * losses[[baseline, *percent]] / losses[baseline].mean()
        estimates = whole_runs.judge({arm: scaled[arm].to_numpy() for arm in scaled}, baseline=baseline, **options)
    if null and estimates[null].within_margin:
        estimates[null] = replace(estimates[null], worse=False, better=False)
    return estimates


def _gap_columns() -> list[str]:
    return ["gap", "gap_pct", *(f"{loss}_{kind}" for loss in LOSSES for kind in ("gap", "gap_pct"))]


def _points(
    finals: pd.DataFrame, gaps: Mapping[str, pd.DataFrame], percent: Mapping[str, pd.DataFrame], decides: str
) -> pd.DataFrame:
    """Family.points."""
    parts = {}
    for loss in LOSSES:
        parts |= {f"{loss}_gap": gaps[loss], f"{loss}_gap_pct": percent[loss]}
    parts = {"gap": gaps[decides], "gap_pct": percent[decides]} | parts
    long = pd.DataFrame(
        {name: frame.rename_axis(columns="arm").stack(future_stack=True) for name, frame in parts.items()}
    )
    rows = long.reset_index().drop(columns="order")
    order = {arm: place for place, arm in enumerate(finals["arm"].unique())}
    rows = rows.sort_values("arm", key=lambda arms: arms.map(order), kind="stable", ignore_index=True)
    return rows[["arm", "trunk", "seed", "point", "draw", *_gap_columns()]]
