"""W&B as a mirror of the rows: never a prompt, never the death of a run.

Everything W&B writes stays in the run's folder (`<run>/wandb/`; a report's in the sweep's). In an offline run its files
reach the disk every second, where W&B's own default loses up to 15 s of a killed run.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import wandb

from hqsweep.config.jobs import VERDICT_COLUMNS
from hqsweep.errors import visible
from hqsweep.sweep.store.names import fork_of, id_in
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.track.tracker import (
    HarmlessTracker,
    NullTracker,
    Tracker,
    harmless,
    one_line,
    resolve_mode,
    verdict_scalars,
)

FAST = {
    "console": "off", "silent": True, "disable_git": True, "disable_code": True, "x_disable_stats": True,
    "x_disable_meta": True, "x_disable_machine_info": True, "x_save_requirements": False,
    "x_transaction_log_flush_interval": 1.0,
}  # fmt: skip
"""Settings that make `init` about six times faster (the manifest has what they leave out) and flush every second."""


_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._-]")
"""The characters that an id may not have, because it stands in addresses and in names of artifacts."""
ID_LENGTH, NAME_LENGTH, TAG_LENGTH = 64, 128, 64
"""The characters that W&B takes of an id, of a name (a run's, an artifact's), and of a tag."""
_FOLDER = re.compile(r"(?:offline-)?run-\d{8}_\d{6}-(?P<id>.+)")
"""The folder of one start of a run, as W&B names it."""


def open_run(run: RunDir, config: Mapping[str, Any], known_id: str | None = None) -> Tracker:
    """Return the mirror of a run: group = sweep, job type = job, and the same id when it is resumed.

    Its tags are whether it is a trunk or a fork, its arm, its seed, and of a fork its point and its trunk. git's commit
    is the run's, and a diff of a changed checkout is its file diff.patch. known_id: known_id_of(run), if its folders
    were deleted.
    """
    manifest, fork = run.manifest(), fork_of(config)
    role, point = ("whole run", "") if fork is None else ("trunk", "") if fork.is_trunk else ("fork", fork.start)
    arm = "trunk" if role == "trunk" else visible(manifest["arm"])
    tags = [role] * (manifest["job"] == "convergence") + [arm[:TAG_LENGTH], f"seed {manifest['seed']}"]
    if role == "fork":
        tags += [f"at {point}", visible(manifest.get("trunk") or fork.trunk_name)[:TAG_LENGTH]]
    rest = f" s{manifest['seed']}{f' at{point}' if role == 'fork' else ''} {visible(id_in(run.name))}"
    tracker = _open(
        run.path,
        config["track"],
        {"git_commit": manifest.get("commit")},
        group=_group(run.sweep),
        job_type=manifest["job"],
        name=arm[: NAME_LENGTH - len(rest)] + rest,
        id=known_id or known_id_of(run) or unique(f"{run.sweep}-{run.name}", f"{run.sweep}/{run.name}", ID_LENGTH),
        tags=list(dict.fromkeys(tags)),
        config=dict(config),
        resume="allow",
    )
    if manifest.get("diff") and isinstance(tracker, WandbTracker):
        tracker.file("diff.patch", manifest["diff"])
    return tracker


def unique(text: str, of: str, length: int) -> str:
    """Return a text of at most `length` characters for addresses: `text` cut, then 10 hex digits of the sha256 of `of`.

    So no two names share it, however long they are.
    """
    digits = hashlib.sha256(of.encode("utf-8", "surrogateescape")).hexdigest()[:10]
    return f"{_NOT_IN_ID.sub('_', text)[: length - len(digits) - 1]}-{digits}"


def _group(sweep: str) -> str:
    """The group of a sweep's runs: its name, cut where it is too long."""
    return visible(sweep) if len(visible(sweep)) <= NAME_LENGTH else unique(sweep, sweep, NAME_LENGTH)


def known_id_of(run: RunDir) -> str | None:
    """Return the id of the run in W&B, from the folder of its first start; None before that.

    So a run that an earlier version started keeps its id.
    """
    starts = sorted((run.path / "wandb").glob("*run-*"), key=lambda path: path.name.removeprefix("offline-"))
    return next((match["id"] for path in starts if (match := _FOLDER.fullmatch(path.name))), None)


def log_report(sweep_path: Path, track: Mapping[str, Any], report: Path, arms: Sequence[Mapping[str, Any]]) -> bool:
    """Mirror a report as a run of job type report beside the runs of the sweep. Return whether everything is stored.

    It has the verdicts of `arms` (of `hqsweep compare --json`) as a table, the verdict and gap of each in its summary,
    the forest plot, and the folder `report` as an artifact. `track`: the section of that name in a run's config. It is
    stored on the server or, offline, in the sweep's folder.
    """
    group, name = _group(sweep_path.name), visible(f"report {report.name}")[:NAME_LENGTH]
    tracker = _open(sweep_path, track, group=group, job_type="report", name=name)
    if not isinstance(tracker, WandbTracker):
        return False
    logged = [tracker.verdicts(arms), tracker.picture("forest", report / "figures" / "forest.svg")]
    return all([*logged, tracker.artifact(report), tracker.finish(0)])


def offline_folders(run: RunDir) -> list[Path]:
    """The folders in which W&B stores an offline run, the earliest first; `wandb sync` uploads them."""
    return sorted((run.path / "wandb").glob("offline-run-*"))


def _open(
    folder: Path, track: Mapping[str, Any], told: Mapping[str, Any] = MappingProxyType({}), **run_fields: Any
) -> Tracker:
    """`wandb.init`, offline if online fails, NullTracker if that fails too. told: further settings."""
    for kind in ("data", "cache", "config"):
        os.environ.setdefault(f"WANDB_{kind.upper()}_DIR", str(folder.resolve() / "wandb" / kind))
    os.environ.setdefault("WANDB_SILENT", "true")
    mode = resolve_mode(track["mode"], os.environ)
    settings = wandb.Settings(**FAST, **told, init_timeout=track["init_timeout_s"])
    for attempt in dict.fromkeys((mode, "offline")):
        try:
            place = {"dir": folder, "project": track["project"], "entity": track["entity"]}
            return WandbTracker(wandb.init(mode=attempt, settings=settings, **place, **run_fields))
        except Exception as error:
            print(f"wandb: cannot track {attempt}: {one_line(error)}", flush=True)
            wandb.teardown()  # its service still holds the run id
    return NullTracker()


class WandbTracker(HarmlessTracker):
    """Tracker over an open W&B run."""

    who = "wandb"

    def __init__(self, run: Any) -> None:
        super().__init__()
        self._run, self._step = run, 0

    def rewind(self, step: int) -> None:
        """Nothing: W&B keeps the steps that it has, which are the same bit for bit."""

    @harmless
    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        self._run.log(dict(values), step=step)

    @harmless
    def table(self, name: str, rows: list[dict[str, Any]]) -> None:
        if rows:
            columns = list(rows[0])
            data = [[row[column] for column in columns] for row in rows]
            table = wandb.Table(columns=columns, data=data, allow_mixed_types=True)
            self._run.log({name: table}, step=self._step)

    @harmless
    def file(self, name: str, text: str) -> None:
        """Keep a text as a file of the run."""
        path = Path(self._run.dir, name)
        path.write_text(text, encoding="utf-8", errors="replace")
        self._run.save(str(path), base_path=self._run.dir, policy="now")

    @harmless
    def verdicts(self, arms: Sequence[Mapping[str, Any]]) -> None:
        """Write the table `verdicts`, and verdict/ARM and tracker.verdict_scalars() as TAG/ARM in the summary."""
        table = wandb.Table(columns=list(VERDICT_COLUMNS), allow_mixed_types=True)
        for arm in arms:
            table.add_data(*(arm[column] for column in VERDICT_COLUMNS))
            name = visible(arm["arm"])
            self._run.summary[f"verdict/{name}"] = arm["verdict"]
            for tag, value in verdict_scalars(arm).items():
                self._run.summary[f"{tag}/{name}"] = value
        self._run.log({"verdicts": table})

    @harmless
    def picture(self, name: str, svg: Path) -> None:
        """Show an SVG file as a panel, if it exists."""
        if svg.exists():
            self._run.log({name: wandb.Html(svg.read_text(encoding="utf-8"), data_is_not_path=True)})

    @harmless
    def artifact(self, folder: Path) -> None:
        name = plain = f"report-{self._run.group}"
        if _NOT_IN_ID.search(plain) or len(plain) > NAME_LENGTH:
            name = unique(plain, plain, NAME_LENGTH)
        artifact = wandb.Artifact(name, type="report")
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact)

    @harmless
    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)
        wandb.teardown()  # waits for W&B's service, which else happens at the exit of the process, without a limit
