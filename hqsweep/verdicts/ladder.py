"""A ladder of sizes: what a recipe's gap will be at a larger size, by two laws that disagree.

Parts      L(N, D) = E + R (s (N / N0)^-alpha + (1 - s) (D / D0)^-beta)^gamma, the form of Castro et al.
           (arXiv:2505.14669) with N0, D0 in the middle of the ladder. A recipe has N effN in the place of the N
           parameters and D effD in the place of the D tokens.
Power      gap = k (N / N0)^-p (D / N / (D0 / N0))^q, the form of Chen et al. (arXiv:2505.14302) and Kumar et al.
           (arXiv:2411.04330).

A few sizes leave most exponents open. So they have priors as wide as the published values differ, and every draw of the
bootstrap takes its prior means from them. A draw also takes the replicates' mean of each size from its t distribution,
weights sizes at random (Rubin's Bayesian bootstrap), and lets a size lie off the law by DEVIATION. The interval of a
prediction goes from the lower law's 2.5 % to the upper one's 97.5 %.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from hqsweep.errors import UserError

DRAWS = 400
FEWEST = 2
"""The fewest sizes of a fit."""
FAR = 10.0
"""How far beyond the largest size a prediction goes without a warning, as a factor."""
DEVIATION = 0.15
"""The share of a gap by which a size may lie off a law (1 sd)."""
LOSS_DEVIATION = 0.003
"""The same of the baseline's loss."""
EXPONENTS = ((0.0, 1.0), (0.0, 1.0), (np.log(0.57), 0.25), (np.log(0.57), 0.25), (np.log(0.4), 0.5))
"""Priors (mean, sd): logits of E over the lowest loss and of s; logs of alpha, beta and gamma."""
POWERS = ((0.0, 0.25), (0.3, 0.25))
"""Priors of p and q: published p are -0.28 to 0.15 at one D / N, q 0.07 to 0.52."""
SHARE = (0.0, 1.5)
"""Prior of the logit of the share of log effN in log effN + log effD: published shares are 0.27 to 0.95."""
LAWS = ("parts", "power")


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One size of a ladder.

    params, tokens  N and D of the runs
    losses          [replicates]: the baseline's, nats
    gaps            arm -> [replicates]: loss of the arm minus loss of the baseline, nats
    """

    params: float
    tokens: float
    losses: np.ndarray
    gaps: Mapping[str, np.ndarray]


Interval = tuple[float, float, float]
"""Median, 2.5 % and 97.5 %."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """An arm's gap at a size, in % of the baseline's loss there.

    gap, low, high  mean of the laws' medians; the interval that holds both laws'
    laws            law -> its own interval
    eff_n, eff_d    by the law of parts; their product is known better than each where all sizes have one D / N
    sizes           the sizes that the fit has seen
    """

    gap: float
    low: float
    high: float
    laws: Mapping[str, Interval]
    eff_n: Interval
    eff_d: Interval
    sizes: int

    @property
    def disagree(self) -> bool:
        """Whether a law's median lies outside of the other one's interval."""
        (a, *wide), (b, *other) = (self.laws[law] for law in LAWS)
        return not (wide[0] <= b <= wide[1] and other[0] <= a <= other[1])


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """An arm's measured gap in % at the largest size, and its prediction from the smaller ones, whose interval has the
    noise of that measurement in it."""

    measured: float
    prediction: Prediction

    @property
    def covered(self) -> bool:
        return self.prediction.low <= self.measured <= self.prediction.high


def predict(
    rungs: Sequence[Rung], params: float, tokens: float, *, draws: int = DRAWS, noise: Mapping[str, float] | None = None
) -> dict[str, Prediction]:
    """The gap of every arm that two rungs or more have, at a size.

    noise: arm -> the standard error, in nats, of a measurement that is to lie in the interval; None: the true gap is.

    UserError for fewer than FEWEST sizes.
    """
    sizes = sorted({rung.params for rung in rungs})
    if len(sizes) < FEWEST:
        raise UserError(f"ladder: {len(sizes)} size of a model; a law needs {FEWEST} at least, and 3 to be checked")
    arms = dict.fromkeys(arm for rung in rungs for arm in rung.gaps)
    found = {}
    for place, arm in enumerate(arms):
        own = [rung for rung in rungs if arm in rung.gaps]
        if len({rung.params for rung in own}) >= FEWEST:
            rng = np.random.default_rng([len(rungs), place, draws])
            found[arm] = _predict(own, arm, (params, tokens), rng, draws, (noise or {}).get(arm, 0.0))
    return found


def hold_out(rungs: Sequence[Rung], *, draws: int = DRAWS) -> dict[str, HeldOut]:
    """Every arm's gap at the largest size against its prediction from the smaller ones; {} for fewer than three."""
    sizes = sorted({rung.params for rung in rungs})
    if len(sizes) <= FEWEST:
        return {}
    largest = max((rung for rung in rungs if rung.params == sizes[-1]), key=lambda rung: rung.tokens)
    seen = [rung for rung in rungs if rung.params < sizes[-1]]
    noise = {arm: _error(gaps) for arm, gaps in largest.gaps.items()}
    predicted = predict(seen, largest.params, largest.tokens, draws=draws, noise=noise)
    percent = 100 / largest.losses.mean()
    return {
        arm: HeldOut(measured=float(largest.gaps[arm].mean() * percent), prediction=prediction)
        for arm, prediction in predicted.items()
        if arm in largest.gaps
    }


def warnings(rungs: Sequence[Rung], params: float, tokens: float) -> list[str]:
    """Sentences about a prediction for this size as such."""
    sizes, said = sorted({rung.params for rung in rungs}), []
    for name, asked, most in (("size", params, sizes[-1]), ("tokens", tokens, max(rung.tokens for rung in rungs))):
        if asked > FAR * most:
            said.append(f"{asked / most:.0f} times the largest {name} measured: more than {FAR:.0f} times is a guess.")
    if len(sizes) < 3:
        said.append(f"{len(sizes)} sizes: no size is left to check the laws by; three at least are.")
    if len({round(np.log(rung.tokens / rung.params), 1) for rung in rungs}) == 1:
        said.append("All sizes have one number of tokens a parameter, which does not tell effN and effD apart.")
    return said


def _error(values: np.ndarray) -> float:
    """The standard error of a mean; NaN for one value."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


def _drawn(samples: Sequence[np.ndarray], rng: np.random.Generator, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """(means [draws, rungs] from the t distribution of each sample, standard errors [rungs]). One value alone takes the
    largest error of the others, or a fifth of itself."""
    errors = np.array([_error(sample) for sample in samples])
    means = np.array([np.mean(sample) for sample in samples])
    known = errors[np.isfinite(errors)]
    errors = np.where(np.isfinite(errors), errors, known.max() if len(known) else np.abs(means) / 5)
    df = np.array([max(1, len(sample) - 1) for sample in samples])
    return means + errors * special.stdtrit(df, rng.uniform(size=(draws, len(samples)))), errors


def _predict(
    rungs: Sequence[Rung], arm: str, at: tuple[float, float], rng: np.random.Generator, draws: int, noise: float
) -> Prediction:
    n, d = (np.array([getattr(rung, name) for rung in rungs], dtype=float) for name in ("params", "tokens"))
    middle = np.exp(np.log(n).mean()), np.exp(np.log(d).mean())
    n, d = n / middle[0], d / middle[1]
    far = at[0] / middle[0], at[1] / middle[1]
    weights = rng.dirichlet(np.ones(len(rungs)), draws) * len(rungs)
    losses, loss_errors = _drawn([rung.losses for rung in rungs], rng, draws)
    gaps, errors = _drawn([rung.gaps[arm] for rung in rungs], rng, draws)
    base = _Baseline.fit(n, d, losses, weights / (loss_errors**2 + (LOSS_DEVIATION * losses) ** 2), rng)
    precision = weights / (errors**2 + (DEVIATION * gaps) ** 2 + 1e-12)
    log_n, log_d = base.fit_parts(n, d, gaps, precision, rng)
    parts = base.gap(*far, log_n, log_d)
    power = _power(n, d, gaps, precision, rng)(*far)
    loss = base.loss(*far)
    measured = np.nan_to_num(noise) * rng.normal(size=draws)
    laws = {}
    for law, predicted in zip(LAWS, (parts, power), strict=True):
        off = predicted * (1 + DEVIATION * rng.normal(size=draws)) + measured
        laws[law] = _interval(100 * off / loss)
    return Prediction(
        gap=float(np.mean([law[0] for law in laws.values()])), low=min(law[1] for law in laws.values()),
        high=max(law[2] for law in laws.values()), laws=laws, sizes=len(set(n)),
        eff_n=_interval(np.exp(-log_n)), eff_d=_interval(np.exp(-log_d)),
    )  # fmt: skip


def _interval(values: np.ndarray) -> Interval:
    low, median, high = np.quantile(values, (0.025, 0.5, 0.975))
    return float(median), float(low), float(high)


@dataclass(frozen=True, kw_only=True)
class _Baseline:
    """Draws of the law of parts: `x` [draws, 6] are log R, then what EXPONENTS have; `least` the lowest loss."""

    x: np.ndarray
    least: np.ndarray

    @classmethod
    def fit(
        cls, n: np.ndarray, d: np.ndarray, losses: np.ndarray, precision: np.ndarray, rng: np.random.Generator
    ) -> "_Baseline":
        prior = np.array(EXPONENTS)
        means = prior[:, 0] + prior[:, 1] * rng.normal(size=(len(losses), len(prior)))
        least = losses.min(1)
        start = np.column_stack([np.log(losses.mean(1) - least / 2), means])

        def residuals(x: np.ndarray) -> np.ndarray:
            off = (cls(x=x, least=least).loss(n, d) - losses) * np.sqrt(precision)
            return np.concatenate([off, (x[:, 1:] - means) / prior[:, 1]], axis=1)

        return replace(cls(x=start, least=least), x=least_squares(residuals, start))

    @property
    def alpha(self) -> np.ndarray:
        return np.exp(self.x[:, 3:4])

    @property
    def beta(self) -> np.ndarray:
        return np.exp(self.x[:, 4:5])

    def reducible(self, n: np.ndarray, d: np.ndarray, log_n: np.ndarray, log_d: np.ndarray) -> np.ndarray:
        """R (...)^gamma [draws, sizes] where N counts exp(-log_n) and D exp(-log_d) [draws, 1]."""
        share = special.expit(self.x[:, 2:3])
        sums = share * np.exp(self.alpha * (log_n - np.log(n))) + (1 - share) * np.exp(self.beta * (log_d - np.log(d)))
        return np.exp(np.clip(self.x[:, :1] + np.exp(self.x[:, 5:6]) * np.log(sums), -50, 50))

    def loss(self, n: np.ndarray, d: np.ndarray) -> np.ndarray:
        """[draws, sizes], or [draws] for one size."""
        found = (self.least * special.expit(self.x[:, 1]))[:, None] + self.reducible(n, d, 0.0, 0.0)
        return found[:, 0] if np.ndim(n) == 0 else found

    def gap(self, n: np.ndarray, d: np.ndarray, log_n: np.ndarray, log_d: np.ndarray) -> np.ndarray:
        """The gap that -log effN and -log effD [draws] make, shaped as loss()."""
        found = self.reducible(n, d, log_n[:, None], log_d[:, None]) - self.reducible(n, d, 0.0, 0.0)
        return found[:, 0] if np.ndim(n) == 0 else found

    def fit_parts(
        self, n: np.ndarray, d: np.ndarray, gaps: np.ndarray, precision: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """-log effN and -log effD [draws]."""
        share = SHARE[0] + SHARE[1] * rng.normal(size=len(gaps))
        step = np.full(len(gaps), 1e-3)
        slope = self.gap(n, d, step / 2, step / 2) / 1e-3
        scale = (precision * slope * gaps).sum(1) / (precision * slope**2).sum(1)
        scale = np.clip(scale, -1, 3)

        def logs(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            total, part = np.clip(x[:, 0], -3, 6), special.expit(x[:, 1])
            return total * part, total * (1 - part)

        def residuals(x: np.ndarray) -> np.ndarray:
            off = (self.gap(n, d, *logs(x)) - gaps) * np.sqrt(precision)
            return np.concatenate([off, (x[:, 1:] - share[:, None]) / SHARE[1]], axis=1)

        return logs(least_squares(residuals, np.column_stack([scale, share])))


def _power(
    n: np.ndarray, d: np.ndarray, gaps: np.ndarray, precision: np.ndarray, rng: np.random.Generator
) -> Callable[[float, float], np.ndarray]:
    """The fitted law of powers: (n, d) -> gaps [draws]."""
    prior = np.array(POWERS)
    means = prior[:, 0] + prior[:, 1] * rng.normal(size=(len(gaps), 2))
    size = np.maximum(np.abs(gaps).mean(1), 1e-9)

    def law(x: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
        exponent = -x[:, 1:2] * np.log(n) + x[:, 2:3] * np.log(d / n)
        return (size * x[:, 0])[:, None] * np.exp(np.clip(exponent, -30, 30))

    def residuals(x: np.ndarray) -> np.ndarray:
        off = (law(x, n, d) - gaps) * np.sqrt(precision)
        return np.concatenate([off, (x[:, 1:] - means) / prior[:, 1]], axis=1)

    x = least_squares(residuals, np.column_stack([gaps.mean(1) / size, means]))
    return lambda n, d: law(x, np.array([n]), np.array([d]))[:, 0]


def least_squares(residuals: Callable[[np.ndarray], np.ndarray], start: np.ndarray, steps: int = 25) -> np.ndarray:
    """The minimum of the sum of squares of residuals(x) [draws, m] over x [draws, k], for every draw at once, by
    Levenberg and Marquardt's method."""
    x, damping = start.copy(), np.full(len(start), 1e-2)
    now = residuals(x)
    cost = (now**2).sum(1)
    eye = np.eye(x.shape[1])
    for _ in range(steps):
        jacobian = np.stack([(residuals(x + 1e-6 * one) - now) / 1e-6 for one in eye], axis=2)
        normal = np.einsum("dmk,dml->dkl", jacobian, jacobian)
        scale = np.einsum("dkk->dk", normal) + 1e-9
        step = np.linalg.solve(normal + (damping[:, None] * scale)[:, :, None] * eye + 1e-12 * eye,
                               -np.einsum("dmk,dm->dk", jacobian, now)[:, :, None])[:, :, 0]  # fmt: skip
        tried = residuals(x + step)
        better = (tried**2).sum(1) < cost
        x[better], now[better], cost[better] = (x + step)[better], tried[better], (tried**2).sum(1)[better]
        damping = np.where(better, damping * 0.3, np.minimum(damping * 4, 1e6))
    return x
