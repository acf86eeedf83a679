"""The one checked line at the end of the quickstart: did every recipe train, and does each stay near the baseline?"""

import math
from typing import Any

from hqsweep.errors import UserError
from hqsweep.report.arms import Comparison
from hqsweep.report.curves import ENTROPY
from hqsweep.report.text import number


def within_band(comparison: Comparison, band_nats: float, floor_nats: float | None = None) -> tuple[bool, str]:
    """(ok, sentence): every arm's final loss is within `band_nats` of its baseline's (in either direction, seed by
    seed where paired), every arm's mean final loss is below `floor_nats`, and no run is without a result. The floor
    defaults to the unigram entropy of the validation data, which a model that ignores its context cannot beat, as the
    runs' manifests state it. Raises UserError for band_nats <= 0."""
    if not band_nats > 0:
        raise UserError(f"band: {band_nats} nats; give a positive number such as 0.1")
    floor = _stated_floor(comparison) if floor_nats is None else floor_nats
    faults = [fault for row in comparison.arms.itertuples() if (fault := _fault(row, band_nats, floor))]
    limits = f"band {band_nats:g} nats" + (f", unigram entropy {floor:.4f} nats" if floor is not None else "")
    if faults:
        return False, f"check failed ({limits}): {'; '.join(faults)}"
    others = comparison.arms[comparison.arms["arm"] != comparison.arms["baseline"]]
    held = "there is no other arm"
    if len(others):
        widest = others.loc[others["gap"].abs().idxmax()]
        held = f"the largest gap to '{comparison.baseline}' is {widest['gap']:+.4f} nats ('{widest['arm']}')"
    return True, f"check passed ({limits}): {held}" + (", every arm is below the entropy" if floor is not None else "")


def _fault(row: Any, band_nats: float, floor: float | None) -> str | None:
    """The first thing that is wrong with an arm (a row of Comparison.arms), None when all is well."""
    if row.state != f"{row.runs} finished":
        return f"'{row.arm}' has {row.state}"
    if math.isnan(row.final_loss):
        return f"'{row.arm}' has no finite val_loss"
    if row.arm != row.baseline and not abs(row.gap) <= band_nats:
        return f"'{row.arm}' ends {number(row.gap, '+.4f', 'an unknown number of')} nats from '{row.baseline}'"
    if floor is not None and not row.final_loss < floor:
        return f"'{row.arm}' ends at {row.final_loss:.4f} nats, not below the entropy"
    return None


def _stated_floor(comparison: Comparison) -> float | None:
    """The lowest unigram entropy that a manifest states, in nats; None when none does."""
    runs = comparison.frames.runs
    lowest = runs[ENTROPY].min() if ENTROPY in runs else math.nan
    return None if math.isnan(lowest) else float(lowest)
