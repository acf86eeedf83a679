"""docs/reference/statistics.md: what each number of a report is, by the docstrings of the modules that compute it."""

from docs.generate.source import docstring
from hqsweep.ops import stats
from hqsweep.report import arms, frames, gate

CHAPTERS = {
    "Errors of quantized tensors and of GEMMs (stats.jsonl)": (stats,),
    "Losses, gaps and intervals (`hqsweep compare`)": (
        arms,
        arms.interval,
        arms.baselines,
        arms.trailing,
        arms.outcome,
    ),
    "Columns of compare.csv and runs.csv": (arms.Comparison,),
    "The gate (`hqsweep gate`)": (gate, gate.Verdict, gate.gate),
    "Rows and frames": (frames,),
}


def page() -> str:
    parts = ["# Statistics\n"]
    for chapter, things in CHAPTERS.items():
        parts += [f"## {chapter}\n", *map(docstring, things)]
    return "\n".join(parts)
