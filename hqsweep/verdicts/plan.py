"""How many replicates a verdict needs, and how wide an interval will be: power by exact numbers.

Power is integrated over the chi-square values of the standard error, with the normal distribution of the gap inside.
The noncentral t of scipy is not used: its cdf is NaN for strong effects. A sequential study is taken at the level of
its last look, which is a lower bound of its power.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import optimize, special

from hqsweep.errors import UserError
from hqsweep.verdicts.designs import Design, Forks, WholeRuns
from hqsweep.verdicts.estimate import POWER

DESIGNS = ("whole runs", "forks")
MOST = 1000
"""The number of replicates beyond which a verdict is out of reach."""


def power_of_claim(design: Design, n: int, effect: float) -> float:
    """Probability that n replicates call a true gap worse or better; `effect` is the gap over one replicate's sd."""
    far = design.critical(n, design.maximum) * np.sqrt(design.variances(n))
    shift = abs(effect) * math.sqrt(n)
    return float(np.mean(special.ndtr(shift - far) + special.ndtr(-shift - far)))


def power_of_equivalence(design: Design, n: int, effect: float, margin: float) -> float:
    """Probability that n replicates call a true gap equivalent; gap and margin over one replicate's sd."""
    near = design.equivalence(n, design.maximum) * np.sqrt(design.variances(n))
    shift, room = abs(effect) * math.sqrt(n), margin * math.sqrt(n)
    return float(np.mean(np.maximum(0, special.ndtr(room - shift - near) - special.ndtr(near - room - shift))))


def needed(
    design: Design, sd: float, *, gap: float | None = None, margin: float | None = None, above: int = 0
) -> float:
    """The fewest replicates, more than `above`, with which a true gap is called worse or better, or equivalent within
    the margin, whichever comes first, with probability POWER. Without `gap`: equivalence where there is none; without
    `margin`: worse or better only. inf beyond MOST; NaN for an unknown sd or gap."""
    if math.isnan(sd) or (gap is not None and math.isnan(gap)):
        return math.nan
    least = max(design.first, above + 1)
    count = math.inf
    if gap:
        count = _fewest(lambda n: power_of_claim(design, n, _over(gap, sd)), least)
    if margin is not None and abs(gap or 0) < margin:
        both = _over(gap or 0.0, sd), _over(margin, sd)
        count = min(count, _fewest(lambda n: power_of_equivalence(design, n, *both), least))
    return count


def _over(value: float, sd: float) -> float:
    return value / sd if sd else math.copysign(1e6, value) * (value != 0)


def _fewest(power: Callable[[int], float], least: int) -> float:
    """The first n >= least whose power reaches POWER; power grows with n, so n is doubled and the last step halved."""
    low, high = least - 1, least
    while power(high) < POWER:
        if high >= MOST:
            return math.inf
        low, high = high, min(2 * high, MOST)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return float(high)


def replicates(
    design: str,
    sd: float,
    arms: int,
    margin: float | None = None,
    gap: float | None = None,
    maximum: int | None = None,
    null: bool = True,
) -> float:
    """The fewest seeds ("whole runs") or trunks ("forks") with which a study of `arms` arms reaches a verdict in 4 of 5
    studies: worse or better for a true `gap`, equivalent within `margin`; with both, whichever comes first.

    sd is the standard deviation of one replicate's gap as `judge` takes it, Estimate.se sqrt(n), in the unit of gap and
    margin. `null`: the study has a null arm, which is the second control of whole runs. `maximum`: the study is
    sequential, and at most so long; more than it means that the study is likely to end undecided.
    """
    if margin is None and gap is None:
        raise ValueError("give the gap to find, or the margin")
    return needed(_design(design, arms, null, maximum), sd, gap=gap, margin=margin)


def half_width(design: str, sd: float, arms: int, n: int, null: bool = True, maximum: int | None = None) -> float:
    """Half of the 95 % interval, joint over `arms` arms, that n replicates give where their sd is as expected; NaN for
    fewer than two. `maximum`: at the look after n of a sequential study, or its last one."""
    if n < 2:
        return math.nan
    return _design(design, arms, null, maximum).critical(n, min(n, maximum or n)) * sd / math.sqrt(n)


def to_settle(sd: float, arms: int, margin: float, maximum: int) -> float:
    """The fewest trunks after which, in 4 of 5 studies of fork.until=settled, the intervals reach no further than the
    margin; inf where `maximum` trunks do not. sd and margin in one unit, of the loudest arm."""
    design = Forks(arms=arms, maximum=maximum)
    for n in range(design.first, maximum + 1):
        if np.mean(design.critical(n) * sd * np.sqrt(design.variances(n) / n) <= margin) >= POWER:
            return float(n)
    return math.inf


def smallest_gap(design: str, sd: float, arms: int, n: int, null: bool = True) -> float:
    """The smallest true gap that n replicates call worse or better in 4 of 5 studies, in the unit of sd, the standard
    deviation of one replicate's gap; NaN for fewer than give a verdict, or an unknown sd."""
    law = _design(design, arms, null, None)
    if n < law.first or math.isnan(sd):
        return math.nan
    return sd * optimize.brentq(lambda effect: power_of_claim(law, n, effect) - POWER, 0.0, 10 * law.critical(n))


def _design(name: str, arms: int, null: bool, maximum: int | None) -> Design:
    if name not in DESIGNS:
        raise UserError(f"design: '{name}'; allowed are {' and '.join(DESIGNS)}")
    if name == "forks":
        return Forks(arms=arms, maximum=maximum)
    return WholeRuns(arms=arms, controls=2 if null else 1, maximum=maximum)
