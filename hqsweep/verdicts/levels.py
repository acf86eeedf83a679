"""Levels of the looks at a growing study: after each replicate n = 2, 3, ... N, where N is stated before the first.

By look n a study without any gap has raised a false flag with probability level (n / N)^2 (alpha spending by a power
family). t values of few degrees of freedom jump more from look to look than normal theory has it, whose boundary would
make 7 % of 5 %; so the law of the t values themselves is followed, without simulation:

u_n = t_n / sqrt(n - 1 + t_n^2) is the cosine between the n values and (1, ..., 1). Given u_{n+1}, the last value as a
share of the vector's length is y = u_{n+1} / sqrt(n + 1) + sqrt((1 - u_{n+1}^2) n / (n + 1)) w with w = a coordinate
of a uniform direction in n dimensions, and u_n = (sqrt(n + 1) u_{n+1} - y) / sqrt(n (1 - y^2)). Hence, with G_n(u)
the probability that no look before n raised a flag, G_{n+1}(u_{n+1}) is the mean over w of G_n(u_n) where u_n lies
within look n's bound; and the level of look n + 1 is the tail of t in which G_{n+1} integrates to what this look may
spend.
"""

import numpy as np
from scipy import special

from hqsweep.errors import UserError
from hqsweep.memo import memo
from hqsweep.verdicts.estimate import MAXIMUM

TAILS = 400
DIRECTIONS = 1000
"""The number of points of the tail probabilities, and of w. Four times as many move no level of up to 16 looks by more
than 0.05 %, and none of 100 looks by more than 0.3 %."""


def two_sided(level: float, n: int, maximum: int) -> float:
    """The p of the two-sided t test of n replicates below which this look raises a flag, when `level` is spent by
    `maximum`."""
    check(n, maximum)
    return _levels(level, maximum, True)[n - 2]


def one_sided(level: float, n: int, maximum: int) -> float:
    """two_sided() for a one-sided t test."""
    check(n, maximum)
    return _levels(level, maximum, False)[n - 2]


def check(n: int, maximum: int) -> None:
    """Raise UserError for more replicates than were stated, or a statement that is out of reach."""
    if not 2 <= maximum <= MAXIMUM:
        raise UserError(f"seeds.max: {maximum}; allowed are 2 to {MAXIMUM} replicates")
    if n > maximum:
        raise UserError(f"seeds.max: {maximum}, and {n} replicates are there; the largest number is stated beforehand")


@memo
def _levels(level: float, maximum: int, both: bool) -> list[float]:
    """The levels of the looks 2, ..., maximum. `both`: flags are raised on either side."""
    first = level * (2 / maximum) ** 2
    tails = np.geomspace(first * 1e-4, 0.5, TAILS)
    levels, cosine, quiet, bound = [], None, None, None
    for n in range(2, maximum + 1):
        upper = _cosine(n, -special.stdtrit(n - 1, tails))
        now = np.concatenate([-upper, upper[-2::-1]])
        quiet = np.ones_like(now) if n == 2 else _quiet(n, now, cosine, quiet, (-bound if both else -1.0, bound))
        cosine, high = now, quiet[::-1][:TAILS]
        steps = np.concatenate([[high[0] * tails[0]], (high[1:] + high[:-1]) / 2 * np.diff(tails)])
        spend = level * (n**2 - (n - 1) ** 2 * (n > 2)) / maximum**2 / (2 if both else 1)
        tail = np.interp(spend, np.cumsum(steps), tails)
        bound = _cosine(n, -special.stdtrit(n - 1, tail))
        levels.append(float(tail) * (2 if both else 1))
    return levels


def _cosine(n: int, t: np.ndarray) -> np.ndarray:
    return t / np.sqrt(n - 1 + t * t)


def _quiet(n: int, now: np.ndarray, before: np.ndarray, quiet: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    """G_n at the cosines `now`, from G_{n-1} = `quiet` at the cosines `before` and the bounds of look n - 1."""
    even = (np.arange(DIRECTIONS) + 0.5) / DIRECTIONS
    direction = np.sin(np.pi * (even - 0.5)) if n == 3 else _cosine(n - 1, special.stdtrit(n - 2, even))
    share = now[:, None] / np.sqrt(n) + np.sqrt((1 - now[:, None] ** 2) * (n - 1) / n) * direction
    previous = (np.sqrt(n) * now[:, None] - share) / np.sqrt((n - 1) * (1 - share**2))
    inside = (bounds[0] <= previous) & (previous <= bounds[1])
    return (np.interp(previous, before, quiet) * inside).mean(1)
