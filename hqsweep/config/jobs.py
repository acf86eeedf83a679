"""The registry of jobs, and the tables that jobs write, with their columns: the one place that names them.

A new job is a line here. The parts stand in other packages and are named as text, for pkgutil.resolve_name, so that
only their users import them. The module imports nothing of the package: measurement (ops, nn), writers (track) and
readers (report) can all have the tables from here.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """The parts of a job."""

    config: str
    """Class of its config."""
    run: str
    """Function (config, sink, workspace) that does it."""
    table: str
    """Table of its rows."""
    printer: str | None = None
    """Function that prints the table, for rows that PASS, FAIL or SKIP."""
    compared: bool = False
    """Whether its runs are runs of arms, which are compared."""


JOBS = {
    "convergence": JobKind(
        config="hqsweep.config.job:ConvergenceConfig",
        run="hqsweep.jobs.convergence:run",
        table="metrics",
        compared=True,
    ),
    "parity": JobKind(
        config="hqsweep.config.job:ParityConfig",
        run="hqsweep.jobs.parity.job:run",
        table="parity",
        printer="hqsweep.report.pages.checks:matrix",
    ),
    "calibrate": JobKind(
        config="hqsweep.config.job:CalibrateConfig",
        run="hqsweep.jobs.calibration:run",
        table="calibrate",
        printer="hqsweep.report.pages.checks:tables",
    ),
    "command": JobKind(
        config="hqsweep.config.command:CommandConfig", run="hqsweep.jobs.command:run", table="metrics", compared=True
    ),
}
"""Name of the job, as in `job: parity` of a config -> its parts."""
CHECKED_TABLES = tuple(kind.table for kind in JOBS.values() if kind.printer)
"""Tables whose rows have a status: PASS, FAIL or SKIP."""
COMPARED = tuple(job for job, kind in JOBS.items() if kind.compared)
"""Jobs whose runs are runs of arms."""
COMMAND = "command"
"""The job of programs of the user's own, whose logs are judged like any program's logs."""


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
