"""Statistics of paired differences: their interval, their test, Holm's correction, and the seeds that a claim needs.

Values are differences d_s between two runs of one seed s, in any unit. Student's t of n values with standard deviation
sd is t = (mean - against) / (sd / sqrt(n)), on n - 1 degrees of freedom. Distributions are scipy's.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import pandas as pd
from pandas.api.typing import SeriesGroupBy
from scipy import stats

LEVEL = 0.05
"""How often a sweep without any real difference may claim one: two-sided, over all of its arms together."""
POWER = 0.8
"""How often a real difference is to be found with the seeds that seeds_needed gives."""
MAX_SEEDS = 10_000

Key = TypeVar("Key", bound=Hashable)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of the mean's 95 % interval, mean -+ t(0.975, n - 1) sd / sqrt(n); low and high are NaN for one
    value, all three for none."""
    values = np.asarray(values, dtype=float)
    if values.size == 0:
        return math.nan, math.nan, math.nan
    mean = float(values.mean())
    if values.size == 1:
        return mean, math.nan, math.nan
    half = float(stats.t.ppf(1 - LEVEL / 2, values.size - 1)) * standard_error(values)
    return mean, mean - half, mean + half


def intervals(groups: SeriesGroupBy) -> pd.DataFrame:
    """`interval` of every group at once: columns mean, low, high, and seeds, the number of values."""
    moments = groups.agg(["mean", "std", "count"])
    half = stats.t.ppf(1 - LEVEL / 2, moments["count"] - 1) * moments["std"] / np.sqrt(moments["count"])
    return pd.DataFrame(
        {
            "mean": moments["mean"],
            "low": moments["mean"] - half,
            "high": moments["mean"] + half,
            "seeds": moments["count"],
        }
    )


def standard_error(values: Sequence[float]) -> float:
    """sd / sqrt(n) with n - 1 in the denominator of the variance; NaN for fewer than two values."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def p_value(values: Sequence[float], against: float = 0.0) -> float:
    """Two-sided p of the mean being `against`; NaN for fewer than two values. Without any spread it is 1 or 0."""
    error = standard_error(values)
    off = abs(float(np.mean(values)) - against) if len(values) else math.nan
    if error == 0:
        return float(off == 0)
    return float(2 * stats.t.sf(off / error, len(values) - 1)) if len(values) > 1 else math.nan


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Holm's step-down correction: the i-th smallest of m becomes max over j <= i of min(1, (m - j + 1) p_j). Claims
    below LEVEL are then wrong in at most a share LEVEL of families, whatever depends on what (Holm 1979). NaN stays."""
    known = sorted((p, key) for key, p in p_values.items() if not math.isnan(p))
    corrected, highest = dict(p_values), 0.0
    for place, (p, key) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - place) * p))
        corrected[key] = highest
    return corrected


def seeds_needed(sd: float, gap: float, tests: int = 1) -> float:
    """The fewest seeds by which a true mean `gap` of differences with this sd is found with probability POWER, when it
    is one of `tests` (two-sided at LEVEL / tests, the first step of Holm's). Exact, by the noncentral t.

    Never fewer than 2; inf beyond MAX_SEEDS or for no gap; NaN for an unknown sd or gap.
    """
    if math.isnan(sd) or math.isnan(gap):
        return math.nan
    level, gap = LEVEL / max(1, tests), abs(gap)
    normal = stats.norm.ppf(1 - level / 2) + stats.norm.ppf(POWER)
    if gap == 0 or (normal * sd / gap) ** 2 > MAX_SEEDS:
        return math.inf
    n = max(2, math.ceil((normal * sd / gap) ** 2))  # of a known sd; t needs at least as many
    while _power(n, gap / sd if sd else math.inf, level) < POWER:
        n += 1
    return float(n)


def _power(n: int, effect: float, level: float) -> float:
    """Probability that |t| of n differences exceeds its critical value; effect is mean / sd."""
    if math.isinf(effect):
        return 1.0
    critical, shift = stats.t.ppf(1 - level / 2, n - 1), effect * math.sqrt(n)
    return float(stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift))
