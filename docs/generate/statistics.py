"""docs/reference/statistics.md: what each number of a report is, by the docstrings of the modules that compute it."""

import inspect
from types import ModuleType

from docs.generate.source import docstring
from hqsweep.nn.core import probe
from hqsweep.ops import stats
from hqsweep.report.compare import arms, curves, families, frames, verdict
from hqsweep.report.gate import baseline, baseline_update, change, gate
from hqsweep.report.gate import verdict as gate_verdict
from hqsweep.verdicts import (
    ages,
    course,
    effects,
    estimate,
    forks,
    fractions,
    ladder,
    levels,
    plan,
    slowdown,
    whole_runs,
)

CHAPTERS = {
    "Errors of quantized tensors and of GEMMs": (stats, ()),
    "Rows of a step": (probe, ()),
    "Gaps": (arms, (arms.Comparison, arms.baselines)),
    "Which runs enter": (families, (families.Family, families.judge)),
    "Verdicts": (estimate, (estimate.Estimate,)),
    "Whole runs": (whole_runs, (whole_runs.judge,)),
    "Forks": (forks, (forks.judge, forks.these_forks)),
    "Forks that end together": (ages, None),
    "The course of a gap": (course, (course.Course, course.course)),
    "Slowdown": (slowdown, (slowdown.Slowdown, slowdown.slowdown)),
    "Designs of factorial studies": (fractions, (fractions.Fraction, fractions.fraction)),
    "Effects of a factorial study": (effects, (effects.Effect, effects.judge)),
    "Ladders of sizes": (ladder, (ladder.Rung, ladder.Prediction, ladder.predict, ladder.hold_out)),
    "Looks at a growing study": (levels, None),
    "Replicates": (plan, None),
    "What is said of an arm": (verdict, (verdict.sentence,)),
    "Curves": (curves, None),
    "The gate": (gate, (gate.gate, gate_verdict.Verdict, gate_verdict.Verdicts)),
    "Changes since the baseline": (change, (change.changes, change.judge)),
    "Baselines": (baseline, (baseline.Baseline, baseline_update.update)),
    "Rows and frames": (frames, ()),
}
"""Heading -> module, and those of its things that define a number; None for all public functions."""


def page() -> str:
    parts = ["# Statistics\n"]
    for chapter, (module, things) in CHAPTERS.items():
        parts += [f"## {chapter}\n", docstring(module)]
        for thing in _functions(module) if things is None else things:
            parts += [f"`{thing.__name__}`\n", docstring(thing)]
    return "\n".join(parts)


def _functions(module: ModuleType) -> list[object]:
    made = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]
    return [function for function in made if not function.__name__.startswith("_")]
