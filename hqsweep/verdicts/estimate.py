"""The estimate of one arm's gap to the baseline, and the verdict that it gives."""

from dataclasses import dataclass

VERDICTS = ("worse", "better", "equivalent", "undecided")
LEVEL = 0.05
"""How often a study without any real gap may call an arm worse or better: two-sided, over all of its arms together.
An arm whose gap is the margin is called equivalent as often."""
POWER = 0.8
"""How often a gap is to be found with the replicates that are said to be needed."""
MAXIMUM = 100
"""The largest number of replicates that a study which is looked at after each can state beforehand."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """An arm's gap (arm minus baseline; the unit is the caller's, nats or % of the baseline's loss) over n replicates.

    gap                mean over replicates
    se, df             standard error of `gap` and its degrees of freedom; NaN for one replicate
    ci_low, ci_high    95 % interval, joint over all arms under test (the null arm: its own)
    eq_low, eq_high    90 % interval whose two ends are the two one-sided tests of equivalence
    p                  of no gap at all, adjusted for the number of arms
    margin             the largest gap in size that counts as none
    worse, better      ci_low > 0, ci_high < 0: at this look, or at an earlier one of a sequential study
    within_margin      -margin < eq_low and eq_high < margin, likewise
    needed             replicates in all that give a verdict in 4 of 5 studies, also beyond a sequential study's
                       maximum; NaN where there is one, and for one replicate; inf where 1000 do not
    """

    gap: float
    se: float
    df: float
    n: int
    ci_low: float
    ci_high: float
    eq_low: float
    eq_high: float
    p: float
    margin: float
    worse: bool
    better: bool
    within_margin: bool
    needed: float

    @property
    def verdict(self) -> str:
        """One of VERDICTS. A gap that is resolved and lies within the margin is worse (or better), and within_margin
        says the rest."""
        if self.worse or self.better:
            return "worse" if self.worse else "better"
        return "equivalent" if self.within_margin else "undecided"
