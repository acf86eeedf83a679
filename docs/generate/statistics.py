"""docs/reference/statistics.md: what each number of a report is, by the docstrings of the modules that compute it."""

import inspect
from types import ModuleType

from docs.generate.source import docstring
from hqsweep.config import factorial
from hqsweep.nn.core import probe
from hqsweep.ops import stats
from hqsweep.report.compare import arms, curves, families, frames, verdict
from hqsweep.report.gate import baseline, baseline_update, change, gate
from hqsweep.report.gate import verdict as gate_verdict
from hqsweep.verdicts import course, designs, effects, estimate, judging, ladder, plan

CHAPTERS = {
    "Errors of quantized tensors and of GEMMs": (stats, ()),
    "Rows of a step": (probe, ()),
    "Gaps": (arms, (arms.Comparison, arms.baselines)),
    "Which runs enter": (families, (families.Family, families.judge)),
    "Verdicts": (estimate, (estimate.Estimate,)),
    "Verdicts from gaps": (
        judging,
        (judging.judge_whole_runs, judging.judge_forks, judging.these_forks, judging.Weights, judging.weights),
    ),
    "Gaps over tokens": (course, (course.Course, course.course, course.Slowdown, course.slowdown)),
    "Designs of factorial studies": (factorial, (factorial.Fraction, factorial.fraction)),
    "Effects of a factorial study": (effects, (effects.Effect, effects.judge_effects)),
    "Ladders of sizes": (ladder, (ladder.Rung, ladder.Prediction, ladder.predict, ladder.hold_out)),
    "Designs, and looks at a growing study": (designs, (designs.two_sided, designs.one_sided, designs.check)),
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
