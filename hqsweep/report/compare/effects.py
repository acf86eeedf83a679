"""Effects of a factorial study: the cost of each factor on average over the others, and of each two together."""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from hqsweep.config.factorial import BASELINE, FactorialStudy
from hqsweep.report.compare.frames import DECIDES, FORK, LOSSES
from hqsweep.verdicts.effects import FIRST, contrasts, judge_effects

COLUMNS = ("effect", "order", "pct", "low", "high", "p", "n", "resolved", "aliases")
ROUNDING = 1e-9
"""The distance, in %, of an arm from the sum of effects where there are as many effects as arms."""


@dataclass(frozen=True, kw_only=True)
class Effects:
    """What a factorial study says of its factors.

    table  one row an effect, main effects first: effect ("input.rowwise", "input.rowwise x weight.rowwise"), order (1
           or 2), pct (in % of the baseline's loss; of an interaction what both cost beyond the sum of each alone), low,
           high (95 %, joint over all effects), p (adjusted), n (trunks or seeds), resolved (whether the interval leaves
           0 out, over three replicates at least), aliases (effects of one or two factors that no arm tells apart from
           this one)
    notes  sentences about the design
    """

    table: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=[*COLUMNS]))
    notes: tuple[str, ...] = ()


def effects_of(study: FactorialStudy | None, finals: pd.DataFrame, points: pd.DataFrame, design: str) -> Effects:
    """The effects of the study's arms; none without a study, or where too few of its arms have a result.

    finals: the rows of curves.measures with `diverged_at`. points: Comparison.points.
    """
    if study is None or BASELINE not in set(finals["arm"]):
        return Effects()
    whole = study.design
    gaps = _complete(_gaps(study, finals, points, design))
    arms = [arm for arm in study.arms if arm in gaps]
    lacking = [arm for arm in study.arms if arm not in arms]
    levels = np.array(whole.runs)[[[*study.arms].index(arm) for arm in arms]]
    wanted = whole.effects()
    said = [_design_note(study)]
    if lacking:
        said.append(
            f"{', '.join(lacking)}: no result, so least squares over the other {len(arms)} arms give the effects."
        )
    try:
        judged = judge_effects(gaps[arms].to_numpy(), levels, wanted)
    except ValueError:
        return Effects(notes=(*said, f"{len(arms)} arms with a result do not tell the effects apart; none is shown."))
    rows = [
        {
            "effect": study.label(effect.factors), "order": len(effect.factors), "pct": effect.value, "low": effect.low,
            "high": effect.high, "p": effect.p, "n": effect.n, "resolved": effect.resolved,
            "aliases": ", ".join(map(study.label, whole.aliases(effect.factors))),
        }
        for effect in judged
    ]  # fmt: skip
    if len(gaps) < FIRST:
        said.append(f"{len(gaps)} replicates: an effect is claimed from {FIRST} on.")
    said += _fit_note(gaps[arms].mean().to_numpy(), levels, wanted)
    return Effects(table=pd.DataFrame(rows, columns=[*COLUMNS]), notes=tuple(said))


def _gaps(study: FactorialStudy, finals: pd.DataFrame, points: pd.DataFrame, design: str) -> pd.DataFrame:
    """[replicates, arms] of the design: gaps to its baseline in % of the baseline's loss; forks as the verdicts have
    them, the weighted sum over a trunk's points."""
    if design == FORK:
        own = points[points["arm"].isin(study.arms)]
        sums = (own["gap_pct"] * own["weight"]).groupby([own["trunk"], own["arm"]], sort=False).sum()
        return sums.unstack().assign(**{BASELINE: 0.0}) if len(sums) else pd.DataFrame()
    losses = finals[finals["arm"].isin(study.arms)].pivot(index="trunk", columns="arm", values=LOSSES[DECIDES[design]])
    base = losses[BASELINE]
    return 100 * losses.sub(base, axis=0) / base.mean()


def _complete(gaps: pd.DataFrame) -> pd.DataFrame:
    """The replicates that every arm has, without arms that have fewer than half of the most."""
    return gaps if gaps.empty else gaps.dropna(axis=1, thresh=max(1, gaps.notna().sum().max() // 2)).dropna()


def _design_note(study: FactorialStudy) -> str:
    whole, count = study.design, len(study.factors)
    arms = f"{len(whole.runs)} of {2**count} combinations" if whole.words else f"all {2**count} combinations"
    clear = {3: "main effects are mixed with interactions of two", 4: "interactions of two are mixed with each other"}
    mixed = clear.get(whole.resolution, "no effect of one or two factors is mixed with another")
    return (
        f"A factorial design of {count} factors, {arms}: {mixed}. A main effect is a mean over the levels of the other"
        " factors; an interaction is what both together cost beyond the sum of each alone."
    )


def _fit_note(means: np.ndarray, levels: np.ndarray, effects: tuple[tuple[int, ...], ...]) -> list[str]:
    """How much of the variance between arms main effects explain, and what remains beyond interactions."""
    total = ((means - means.mean()) ** 2).sum()
    if not total > 0:
        return []
    share = {}
    for name, some in (("main", [effect for effect in effects if len(effect) == 1]), ("all", list(effects))):
        fitted = _fitted(means, levels, some)
        share[name] = 100 * (1 - ((means - fitted) ** 2).sum() / total)
    worst = np.abs(means - _fitted(means, levels, list(effects))).max()
    beyond = f"; the arm furthest from their sum is {worst:.2g} % off" if worst > ROUNDING else ""
    return [
        f"Main effects explain {share['main']:.0f} % of the variance between arms, with interactions"
        f" {share['all']:.0f} %{beyond}."
    ]


def _fitted(means: np.ndarray, levels: np.ndarray, effects: list[tuple[int, ...]]) -> np.ndarray:
    """The least-squares fit of the arms' means by these effects."""
    signs = 2.0 * levels - 1
    sums = contrasts(levels, effects) @ means
    return means.mean() + sum(
        value / 2 ** len(effect) * (column := signs[:, list(effect)].prod(1)) - value / 2 ** len(effect) * column.mean()
        for effect, value in zip(effects, sums, strict=True)
    )
