"""The tables that jobs write, and their columns: the one place that names them. It imports nothing, so that what
measures (ops, nn), what writes (track) and what reads (report) can all have them from here.
"""

PARTS = ("scale_bias", "dead_zone_error_pct", "scale_error_pct", "grid_error_pct")
"""Columns of the parts of an error, and of its scale bias; ops/stats.py defines them."""
ERRORS = (
    "sqnr_db", "rel_l2", "cosine", "amax", "underflow_pct", "saturation_pct", "scale_min", "scale_max",
    "row_sqnr_db_median", "row_sqnr_db_p5", *PARTS,
)  # fmt: skip
"""Columns of the error statistics of one tensor in one direction; ops/stats.py defines them."""
LOADS = ("tokens", "load")
"""Columns of how many tokens an expert got, and of that over the mean of all experts."""
PROJECTED = ("exact_tiles_pct",)
"""Columns of projected weights alone; ops/stats.py defines them."""
WHERE = {"step": int, "layer": str, "tensor": str, "direction": str, "format": str}
CHECKED = {"check": str, "case": str, "subject": str, "status": str}
"""Columns of every table whose rows PASS, FAIL or SKIP."""

TABLES: dict[str, dict[str, type]] = {
    "metrics": {"step": int, "metric": str, "value": float},
    "stats": WHERE | dict.fromkeys((*ERRORS, *LOADS, *PROJECTED), float),
    "what_if": WHERE | dict.fromkeys(ERRORS, float),
    "parity": CHECKED | {
        "mismatches": int, "total": int, "first_index": str, "got": str, "expected": str, "note": str,
    },
    "calibrate": CHECKED | {
        "measured_db": float, "source": str, "expected_db": float, "low_db": float, "high_db": float,
        "row_sqnr_db_median": float, "row_sqnr_db_p5": float, "underflow_pct": float, "note": str,
    },
}  # fmt: skip
"""Table -> column -> type: SQNR in dB, underflow and saturation in % of the elements; a missing value is null."""

SYSTEM: dict[str, type] = {"seconds": float, "step": int} | dict.fromkeys(
    ("cpu_pct", "memory_bytes", "gpu_pct", "gpu_memory_bytes", "gpu_watts", "gpu_joules"), float
)
"""Columns of system.jsonl, the machine over time, which is no result of a job: seconds since 1970; cpu_pct of one
processor and memory of the worker and its ranks; of the GPUs of the run together their mean use, memory, power, and the
energy since the first row of the attempt."""

NAMING = frozenset({"step", "metric", "layer", "tensor", "direction", *CHECKED})
"""Columns that name the subject of a row, and so are never null."""
OPTIONAL = frozenset({*LOADS, *PROJECTED, *PARTS, "row_sqnr_db_median", "row_sqnr_db_p5"})
"""Columns that rows of earlier versions do not have."""

MIRRORED_TABLES = tuple(name for name in TABLES if name != "metrics")
"""Tables that a tracker gets as a whole, beside the metrics."""

VERDICT_COLUMNS = ("arm", "verdict", "gap", "ci_low", "ci_high", "margin", "within_margin", "n", "sentence")
"""Columns of the table of verdicts beside the runs of a sweep; gaps in % of the baseline's loss."""
