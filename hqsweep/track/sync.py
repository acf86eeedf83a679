"""hqsweep sync: the W&B mirror of a run made again from its rows."""

import shutil
from itertools import groupby
from pathlib import Path

from hqsweep.errors import UserError
from hqsweep.sweep.locks import RunBusy
from hqsweep.sweep.store import RunDir
from hqsweep.track.tables import MIRRORED_TABLES
from hqsweep.track.wandb import offline_folders, open_run


def sync(run: RunDir, mode: str) -> list[Path]:
    """Replay metrics.jsonl and the tables under the run's W&B id; returns the folders that `wandb sync` would upload,
    none where the rows went to the server.

    Offline, what W&B had of the run is replaced. Online, the server keeps the steps that it has and takes later ones.
    mode: offline, online or auto, as track.mode. Raises UserError for a run at work, and where W&B does not open.
    """
    config = run.config()
    config["track"] = config["track"] | {"mode": mode}
    try:
        with run.lock():
            for folder in offline_folders(run):
                shutil.rmtree(folder)
            tracker = open_run(run, config)
            for step, rows in groupby(run.rows("metrics"), key=lambda row: row["step"]):
                tracker.log(step, {row["metric"]: row["value"] for row in rows})
            for table in MIRRORED_TABLES:
                tracker.table(table, run.rows(table))
            tracker.finish(run.written_status()["exit_code"] or 0)
    except RunBusy:
        raise UserError(f"{run.name}: it is at work; sync it when it has ended") from None
    return offline_folders(run)
