"""docs/reference/statistics.md: what each number of a report is, by the docstrings of the modules that compute it."""

import inspect
from types import ModuleType

from docs.generate.source import docstring
from hqsweep.ops import stats
from hqsweep.report import arms, baseline, curves, frames, gate, paired, verdict

CHAPTERS = {
    "Errors of quantized tensors and of GEMMs": (stats, ()),
    "Gaps": (arms, (arms.Comparison, arms.baselines)),
    "Intervals, tests and seeds": (paired, None),
    "What a report claims": (verdict, (verdict.outcome,)),
    "Curves": (curves, None),
    "The gate": (gate, (gate.Verdict, gate.Verdicts, gate.gate, gate.decide)),
    "Baselines": (baseline, (baseline.comparable, baseline.gap)),
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
