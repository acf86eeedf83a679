"""hqsweep sync: the mirror of a run made again from its rows."""

import shutil
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from hqsweep.config.engine import TrackConfig, check_installed
from hqsweep.errors import UserError
from hqsweep.host import Busy
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.track.tables import MIRRORED_TABLES
from hqsweep.track.tracker import Tracker


def sync(run: RunDir, mode: str) -> list[Path]:
    """Replay the rows of a run: to TensorBoard where its config tracks by that, else under its W&B id. Returns
    TensorBoard's folder, or the folders that `wandb sync` would upload, none where the rows went to the server.

    Offline, what W&B had of the run is replaced. Online, the server keeps the steps that it has and takes later ones.
    mode: offline, online or auto, as track.mode. Raises UserError for a run at work, and for a missing package.
    """
    config = run.config()
    config["track"] = TrackConfig().model_dump() | (config.get("track") or {}) | {"mode": mode}
    kind = "tensorboard" if config["track"]["kind"] == "tensorboard" else "wandb"
    check_installed(kind)
    try:
        with run.lock():
            return (_to_tensorboard if kind == "tensorboard" else _to_wandb)(run, config)
    except Busy:
        raise UserError(f"{run.name}: it is at work; sync it when it has ended") from None


def _to_wandb(run: RunDir, config: dict[str, Any]) -> list[Path]:
    from hqsweep.track.wandb import known_id_of, offline_folders, open_run  # the other kind works without wandb

    known = known_id_of(run)
    _check_no_link(run.path / "wandb")
    for folder in offline_folders(run):
        shutil.rmtree(folder)
    replay(run, open_run(run, config, known))
    return offline_folders(run)


def _to_tensorboard(run: RunDir, config: dict[str, Any]) -> list[Path]:
    from hqsweep.track.tensorboard import open_tensorboard, tensorboard_folder

    _check_no_link(tensorboard_folder(run))
    replay(run, open_tensorboard(run, config))
    return [tensorboard_folder(run)]


def _check_no_link(folder: Path) -> None:
    """UserError where a mirror that is to be replaced lies behind a link."""
    if folder.is_symlink():
        raise UserError(f"{folder}: is a link, and what is behind it is not deleted; remove the link, then sync again")


def replay(run: RunDir, tracker: Tracker) -> None:
    """Give a tracker all rows of a run, step by step, as they came."""
    tracker.rewind(-1)
    for step, metrics, stats in _steps(run):
        if stats:
            tracker.sampled(step, stats)
        if metrics:
            tracker.log(step, {row["metric"]: row["value"] for row in metrics})
    for table in MIRRORED_TABLES:
        tracker.table(table, run.rows(table))
    tracker.finish(run.written_status()["exit_code"] or 0)


def _steps(run: RunDir) -> Iterator[tuple[int, list[dict], list[dict]]]:
    """(step, rows of metrics, rows of stats) of every step that has any, in order."""
    by_step = itemgetter("step")
    metrics, stats = (
        {step: list(rows) for step, rows in groupby(run.rows(table), by_step)} for table in ("metrics", "stats")
    )
    for step in sorted(metrics.keys() | stats.keys()):
        yield step, metrics.get(step, []), stats.get(step, [])
