"""The gate for CI: this sweep against a stored baseline (baseline.py). An arm is compared with its stored draws.

1. Where config and machine are those of a stored draw, the curves must be its curves, bit for bit: they repeat there,
   so any difference is a regression, and equality is a pass whatever the statistics say.
2. Elsewhere the change since the baseline was stored is judged as `hqsweep compare` judges a gap (change.py): of an
   arm, the change of its gap to the baseline arm; of the baseline arm itself, the change of its loss. A gap is that of
   the final val_loss, over seeds; in a fork study that of train_loss over the decay, trunk by trunk and point by point,
   and of forks that end together that of a whole run.

       worse         the 95 % interval lies above 0: a regression, unless the change is proven to be inside the margin
       better        it lies below 0: a pass
       equivalent    two one-sided tests at 5 % put the change inside the margin (% of the loss): a pass
       undecided     none of these: exit code 4, with the trunks or seeds and minutes of a verdict

   The baseline arm of a fork study can only be worse, or pass: its loss is that of its trunks, which are whole runs,
   and no few trunks resolve a whole run to the margin; what it did not exclude stands in the note.
3. A change of an arm's recipe under its name is named, tensor by tensor, and then judged by rule 2, as what it is.
4. A run that the baseline has and that now diverges is a regression; one that failed or is absent is exit code 3, and
   so is any run of the sweep that is missing or damaged, or has read other data than its baseline arm, or than what is
   stored of it: such a run is named, and no number is taken from it.

False alarms by rule 2, where nothing changed: at most 2.5 % of sweeps for all arms together, and 2.5 % for the two
controls (the baseline arm and the null arm) together.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hqsweep.config.study import margin_in_tokens, parse_margin
from hqsweep.errors import UserError
from hqsweep.report.compare.arms import null_arms
from hqsweep.report.compare.curves import measures
from hqsweep.report.compare.frames import FORK, Frames, common_end, load
from hqsweep.report.compare.left_out import LeftOut
from hqsweep.report.compare.slowdowns import baseline_curves, in_loss
from hqsweep.report.compare.studies import arms_of, of_one_data, other_data, replicate_minutes, seen, study_of
from hqsweep.report.compare.verdict import duration, fault
from hqsweep.report.gate.baseline import (
    UPDATE,
    Baseline,
    Entries,
    Entry,
    Key,
    data_of,
    measure,
    on_data,
    read_baseline,
    recipes_of,
)
from hqsweep.report.gate.change import Family, Pair, broken, changes, difference, equal, judge, recipe_changes
from hqsweep.report.gate.verdict import Verdict, Verdicts
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.verdicts.estimate import Estimate


def gate(run_dirs: Iterable[RunDir], baseline_file: Path, margin: float | str | None = None) -> Verdicts:
    """Judge each arm; margin in % of the loss, or of the tokens ("1% tokens"), None for the sweep's. Raises UserError
    for no convergence run, whole runs and forks together, or a margin that is not above 0 and at most 100."""
    run_dirs = list(run_dirs)
    study = study_of(run_dirs, margin=None if margin is None else parse_margin(margin))
    frames, trunks = load(run_dirs).of_job("convergence").of_design()
    try:
        stored, problem = read_baseline(baseline_file), None
    except UserError as error:
        stored, problem = Baseline(path=baseline_file, recipes={}), str(error)
    _refuse_leftovers(frames, stored)
    frames, trunks = of_one_data(frames, trunks, arms_of(frames.runs, study.baseline))
    stored, others = _on_its_data(frames, stored)
    margin_pct = _in_loss(study.margin, frames, trunks, study.baseline)
    held = Held(
        frames=frames, trunks=trunks, stored=stored, baseline=study.baseline, margin=margin_pct, others=set(others),
        now={key: entry for key, entry in measure(frames).items() if key not in others},
    )  # fmt: skip
    if problem is None and not set(stored.arms) & set(frames.runs["arm"]):
        problem = f"{baseline_file}: no arm in common with these runs (its arms: {', '.join(stored.arms)})"
    arms = dict.fromkeys([*frames.runs["arm"], *stored.arms])
    return Verdicts(
        arms=tuple(map(held.verdict, arms)), replicates=held.replicates, margin=margin_pct, problem=problem,
        left_out=(*frames.left_out, *others.values()), end=held.end,
    )  # fmt: skip


def _in_loss(margin: float | str, frames: Frames, trunks: Frames, baseline: str | None) -> float:
    """The margin in % of the loss: of several baseline arms the smallest."""
    if math.isnan(margin_in_tokens(margin)):
        return float(margin)
    names, design = set(arms_of(frames.runs, baseline).values()), frames.runs["design"].iloc[0]
    curves, finals = baseline_curves(frames, trunks, names), measures(frames, window=1)
    return min(in_loss(margin, name, curves, finals, design) for name in names)


def _on_its_data(frames: Frames, stored: Baseline) -> tuple[Baseline, dict[Key, LeftOut]]:
    """The baseline without the draws of runs on other data than they have read in this sweep, and the entries of the
    runs of which no draw is left."""
    others: dict[Key, LeftOut] = {}
    fit: dict[Key, list[Entry]] = {}
    for run in frames.runs.itertuples():
        key = run.arm, int(run.seed), int(run.point)
        fit[key] = on_data(stored.of(key), seen(run))
        if stored.of(key) and not fit[key]:
            others[key] = other_data(run, data_of(stored.of(key)[0]), f"{stored.path.name} has")
    draws = tuple(
        {key: entry for key, entry in draw.items() if key in others or key not in fit or entry in fit[key]}
        for draw in stored.draws
    )
    return replace(stored, draws=draws), others


def _refuse_leftovers(frames: Frames, stored: Baseline) -> None:
    """UserError where a sweep has runs of one arm, seed and point with several configs, as after a recipe was changed:
    nothing says which of them is meant."""
    runs = frames.runs
    again = runs.duplicated(["sweep", "manifest.arm", "seed", "point"], keep=False) & ~runs["arm"].isin(stored.arms)
    for run in runs[again].itertuples():
        which = f"'{runs.at[run.Index, 'manifest.arm']}', {_where(run.seed, run.point)}"
        raise UserError(
            f"gate: sweep '{run.sweep}' has runs of {which}, with several configs; run it under "
            "another name (sweep=NAME), or delete the folders of the older ones"
        )


@dataclass(frozen=True, kw_only=True)
class Held:
    """A sweep and the stored baseline that it is compared with; `baseline` is the arm or recipe that gaps are measured
    to, None for bf16 or else the first recipe, `margin` is in %. now: the entries of this sweep, without `others`: the
    runs that have read other data than those that are stored of them."""

    now: Entries
    others: Collection[Key]
    frames: Frames
    trunks: Frames
    stored: Baseline
    baseline: str | None
    margin: float

    @property
    def replicates(self) -> str:
        """The word for replicates."""
        return "trunks" if self.design == FORK else "seeds"

    @cached_property
    def design(self) -> str:
        """The design of all runs."""
        return self.frames.runs["design"].iloc[0]

    @cached_property
    def end(self) -> int | None:
        """The step at which all forks end, where they do so together."""
        return common_end(self.frames.runs)

    @cached_property
    def recipes(self) -> Mapping[str, str]:
        """arm -> how its recipe changed since it was stored, "" for not at all; for arms that are on both sides."""
        now = recipes_of(self.frames.runs)
        return {arm: recipe_changes(old, now[arm]) for arm, old in self.stored.recipes.items() if arm in now}

    @cached_property
    def baseline_of(self) -> dict[str, str]:
        """studies.arms_of of these runs."""
        return arms_of(self.frames.runs, self.baseline)

    @cached_property
    def pairs(self) -> dict[str, list[Pair]]:
        """arm -> its runs that are on both sides; for every arm of either side."""
        arms = dict.fromkeys([*self.frames.runs["arm"], *self.stored.arms])
        keys = sorted(key for key in self.stored.keys if key in self.now)
        return {arm: [(self.now[key], self.stored.of(key)) for key in keys if key[0] == arm] for arm in arms}

    def bitwise(self, arm: str) -> bool:
        """Whether every run of an arm that is on both sides has the curves of a stored draw."""
        return bool(self.pairs[arm]) and all(equal(*pair) for pair in self.pairs[arm])

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """arm -> the change in %, for the arms that are not bitwise equal and have runs on both sides."""
        rows = changes(self.frames.runs, self.now, self.stored)
        nulls, by_arm = null_arms(self.frames.runs, self.baseline_of), {}
        moved = [arm for arm in self.baseline_of if self.pairs[arm] and not self.bitwise(arm)]
        for baseline in dict.fromkeys(self.baseline_of[arm] for arm in moved):
            null = nulls.get(baseline)
            arms = [arm for arm in moved if self.baseline_of[arm] == baseline and arm not in (baseline, null)]
            controls = {"baseline": baseline, "null": null if null and self.pairs[null] else None}
            family = Family(arms=arms, end=self.end, **controls)
            estimates = judge(rows, family, self.design, self.margin)
            by_arm |= {arm: estimate for arm, estimate in estimates.items() if arm in moved}
        return by_arm

    def verdict(self, arm: str) -> Verdict:
        """The verdict of one arm, which may be on either side only."""
        runs, pairs = self.frames.runs[self.frames.runs["arm"] == arm], self.pairs[arm]
        stored = {key for key in self.stored.keys if key[0] == arm}
        failed = [f"{_where(run.seed, run.point)} {self._fault(run)}" for run in runs.itertuples() if self._lost(run)]
        here = {(arm, run.seed, run.point) for run in runs.itertuples()}
        absent = [f"{_where(seed, point)} is not in this sweep" for _, seed, point in sorted(stored - here)]
        judged_here = stored - set(self.others)
        diverged = any(run.diverged and (arm, run.seed, run.point) in judged_here for run in runs.itertuples())
        estimate = None if self.bitwise(arm) else self.estimates.get(arm)
        judged = self._judged(arm, estimate) if stored else "new"
        if diverged or judged == "regression":
            outcome = "regression"
        else:
            outcome = "failed" if failed else "missing" if absent else judged
        notes = [*failed, *absent] if len(runs) else ["no run of this arm in the sweep"]
        notes += [difference(pairs, self.recipes.get(arm, ""))] if pairs else []
        notes += [] if stored else [f"not in the baseline; `{UPDATE}` adds it"]
        notes += [self._reason(arm, estimate)] if pairs and not self.bitwise(arm) else []
        shared = {"arm": arm, "outcome": outcome, "margin": self.margin, "recipe": self.recipes.get(arm, "")}
        shared |= {"note": "; ".join(filter(None, notes))}
        if self.bitwise(arm):
            count = runs["trunk"][[(arm, run.seed, run.point) in stored for run in runs.itertuples()]].nunique()
            equal_in_all = {"verdict": "equivalent", "gap": 0.0, "ci_low": 0.0, "ci_high": 0.0, "within_margin": True}
            return Verdict(**shared, **equal_in_all, n=count, bitwise=True)
        if estimate is None:
            return Verdict(**shared, verdict="undecided" if pairs else None)
        taken = ("verdict", "gap", "ci_low", "ci_high", "n", "within_margin", "needed")
        return Verdict(**shared, **{name: getattr(estimate, name) for name in taken})

    def _lost(self, run: Any) -> bool:
        """Whether a run (a row of Frames.runs) has no result."""
        return (run.arm, run.seed, run.point) not in self.now

    def _fault(self, run: Any) -> str:
        """Why a run (a row of Frames.runs) has no result that counts."""
        other = (run.arm, run.seed, run.point) in self.others
        return "has read other data than what is stored of it" if other else fault(run)

    def _judged(self, arm: str, estimate: Estimate | None) -> str:
        """The outcome that curves and estimate give."""
        if self.bitwise(arm):
            return "pass"
        if any(broken(*pair) for pair in self.pairs[arm]):
            return "regression"
        if estimate is None:
            return "undecided"
        if estimate.verdict == "worse" and not estimate.within_margin:
            return "regression"
        return "undecided" if estimate.verdict == "undecided" and not self._is_level(arm, estimate) else "pass"

    def _is_level(self, arm: str, estimate: Estimate) -> bool:
        """Whether the loss of a fork study's trunks is judged, with an interval, and not a gap."""
        return self.design == FORK and self.baseline_of[arm] == arm and math.isfinite(estimate.ci_high)

    def _reason(self, arm: str, estimate: Estimate | None) -> str:
        """What the estimate lacks, or allows, as words beside its verdict and its numbers."""
        margin = f"the margin of {self.margin:.3g} %"
        if estimate is None:
            return f"no {self.replicates[:-1]} in common with '{self.baseline_of[arm]}', so its gap cannot be judged"
        if estimate.verdict in ("worse", "better"):
            return f"{estimate.verdict} than stored" + f", but inside {margin}" * estimate.within_margin
        if estimate.verdict == "equivalent":
            return f"inside {margin}"
        if self._is_level(arm, estimate):
            return f"its own loss is not judged by the margin; a rise up to {estimate.ci_high:.2f} % is not excluded"
        more = estimate.needed - estimate.n
        if math.isinf(more):
            return f"no number of {self.replicates} within reach would decide; raise {margin}"
        count = "more" if math.isnan(more) else f"about {more:.0f} more"
        cost = duration(more * replicate_minutes(self.frames.runs, self.trunks.runs))
        return f"{count} {self.replicates if more != 1 else self.replicates[:-1]}{cost} would decide"


def _where(seed: int, point: int) -> str:
    return f"seed {seed}" + (f" at step {point}" if point else "")
