"""The registry of jobs: a new job is a line here. The parts stand in other packages and are named as text, for
pkgutil.resolve_name, so that only their users import them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class JobKind:
    """The parts of a job."""

    config: str
    """Class of its config."""
    run: str
    """Function (config, sink, workspace) that does it."""
    table: str
    """Table of its rows in track/tables.py."""
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
        run="hqsweep.jobs.calibrate.job:run",
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
