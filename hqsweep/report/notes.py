"""What is to be said of a comparison as a whole: which runs entered, what its intervals cover, what it cannot see."""

from collections.abc import Sequence

import pandas as pd

from hqsweep.report.families import Family
from hqsweep.report.frames import FORK
from hqsweep.report.studies import Study
from hqsweep.report.verdict import BLIND, FEWEST_TRUNKS


def study_notes(families: Sequence[Family], finals: pd.DataFrame, study: Study) -> tuple[str, ...]:
    """One sentence or two each."""
    notes = []
    for family in families:
        notes += [*family.left_out, *_apart(family), *_null(family)]
    if study.maximum:
        unit = "trunk" if families[0].design == FORK else "seed"
        notes.append(
            f"Looked at after every {unit}, {study.maximum} at most: the 5 % of false claims are of all looks together."
        )
    if families[0].design == FORK:
        notes += [*_coverage(families), BLIND]
    return tuple(dict.fromkeys(notes))


def _apart(family: Family) -> list[str]:
    if not family.apart:
        return []
    said = ", ".join(f"'{arm}' ({why})" for arm, why in family.apart.items())
    return [f"No part of the arms that are judged together: {said}."]


def _null(family: Family) -> list[str]:
    if family.null is not None or not family.estimates:
        return []
    return [f"No null arm of '{family.baseline}' checks the machinery; null_arm=true adds one."]


def _coverage(families: Sequence[Family]) -> list[str]:
    """What the intervals speak of."""
    notes = []
    for family in families:
        points = family.points
        if points.empty:
            continue
        trunks, draws = points["trunk"].nunique(), " / ".join(dict.fromkeys(points["draw"]))
        if trunks >= FEWEST_TRUNKS:
            notes.append(
                f"The intervals cover trunks of this model, data and recipe ({trunks} are here), at the fork points"
                f" {draws}, averaged; the gap at each point is listed."
            )
        elif trunks == 1:
            notes.append(
                f"The intervals cover the fork points {draws} of this one trunk, and say nothing about another seed."
            )
        else:
            notes.append(
                f"The intervals cover the fork points {draws} of these two trunks; a verdict about all trunks needs"
                " three."
            )
    return notes
