"""hqsweep.track: a loop of the user's own as a run, which is sealed, listed, compared and gated like hqsweep's own.

    with hqsweep.track("study", arm="nvfp4", seed=0, config={"lr": 1e-3}) as run:
        for step in run.steps(1, 1001):      # sets seed and step for +sr and delayed scaling
            run.log(step, loss=train_step())

In a process that `hqsweep run conf=command` has started, the rows go to that run, whatever names are given here.
"""

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from pydantic import ValidationError

from hqsweep.config.command import CommandConfig
from hqsweep.config.jobs import COMMAND
from hqsweep.config.safe import loads
from hqsweep.config.section import sentence
from hqsweep.errors import EXIT_FAILED, Damaged, UserError
from hqsweep.host import Busy, holder
from hqsweep.jobs.command import ARM, ROWS, RUN_DIR, SEED, Rows, send
from hqsweep.sweep.engine.task import reason_of
from hqsweep.sweep.store.names import run_id
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.sweep.store.store import RunStore
from hqsweep.sweep.store.sweep_file import is_sweep
from hqsweep.track.machine import facts
from hqsweep.track.open import open_tracker
from hqsweep.track.rows import RowSink

CONF = "hqsweep.track"
"""What `hqsweep ls` shows as the config of such a sweep."""
Mirror = Literal["none", "wandb", "tensorboard", "trackio"]


class Target(Protocol):
    """Takes the rows of a run, and its end."""

    def row(self, step: int, values: Mapping[str, float]) -> None: ...

    def end(self, error: BaseException | None) -> None: ...


def track(
    sweep: str,
    *,
    arm: str,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    runs_dir: str | Path = "runs",
    mirror: Mirror | Mapping[str, Any] = "none",
    judge: Mapping[str, Any] | None = None,
    force: bool = False,
) -> "TrackedRun":
    """Begin a run, and return it; use it in a `with` block, which ends it: finished, or failed where the block raises.

    sweep     the sweep that it belongs to; all of its arms and seeds are compared with each other
    arm       what is compared: a recipe, an optimizer
    seed      the replicate; runs of one seed should share initial weights and the order of data
    config    what else makes the run, as JSON: another config is another run
    mirror    where rows are shown, too: "wandb" (offline), "tensorboard", "trackio" (here), or the section
              `track` of a config
    judge     how the rows are judged: metric, lower_is_better, margin, window, null_arm
    force     repeat a run that has finished

    A run that was interrupted goes on: its rows from the first step of this process on are dropped. Processes of ranks
    above 0 (RANK) log nothing.

    Raises UserError for a run that has finished, or that another process works on; for an arm and seed that the sweep
    has with another config; and for wrong arguments.
    """
    if int(os.environ.get("RANK", 0) or 0) > 0:
        return TrackedRun(_Nowhere(), Place(arm=arm, seed=seed, config=config or {}, path=None))
    if ROWS in os.environ:
        return _of_command(seed, config or {})
    checked = _checked(sweep, arm, seed, config or {}, {"runs_dir": str(runs_dir), "track": _mirror(mirror)}, judge)
    run = _created(checked, arm)
    place = Place(arm=arm, seed=seed, config=checked.args, path=run.path)
    return TrackedRun(_Folder(run, force=force), place)


def _mirror(mirror: Mirror | Mapping[str, Any]) -> dict[str, Any]:
    """The section track; W&B is offline unless the section says otherwise."""
    return {"kind": mirror, "mode": "offline"} if isinstance(mirror, str) else dict(mirror)


def _checked(
    sweep: str, arm: str, seed: int, config: Mapping[str, Any], own: Mapping[str, Any], judge: Mapping[str, Any] | None
) -> CommandConfig:
    """The config of the run. UserError for all that is wrong."""
    if not isinstance(arm, str) or not arm.strip() or not arm.isprintable():
        raise UserError(f"track: arm={arm!r}; it takes a name, as in arm='nvfp4'")
    try:
        args = loads(json.dumps(dict(config)))
    except (TypeError, ValueError) as error:
        raise UserError(f"track: config has what JSON lacks ({error}); give numbers, texts, lists and dicts") from None
    keys = {"job": COMMAND, "sweep": sweep, "seed": seed, "recipe": {"name": arm}, "args": args, **own}
    try:
        return CommandConfig.model_validate(keys | {"judge": dict(judge or {})})
    except ValidationError as error:
        raise UserError(f"track: {sentence(error, CommandConfig)}") from None


@dataclass(frozen=True, kw_only=True)
class _Planned:
    config: Mapping[str, Any]
    arm: str
    overrides: tuple[str, ...] = ()


def _created(config: CommandConfig, arm: str) -> RunDir:
    """The folder of the run, made where it is missing."""
    store, dump = RunStore(Path(config.runs_dir)), config.model_dump(mode="json")
    _check_alike(store, config.sweep, arm, dump)
    planned = _Planned(config=dump, arm=arm)
    study = None if is_sweep(store.root / config.sweep) else {}
    return store.create(sweep=config.sweep, conf=CONF, overrides=[], study=study, runs=[planned], say=_say)[0]


def _check_alike(store: RunStore, sweep: str, arm: str, config: Mapping[str, Any]) -> None:
    """UserError where the sweep is of another kind, or has this arm and seed with another config."""
    if not is_sweep(store.root / sweep):
        return
    if (conf := store.facts(sweep)["conf"]) != CONF:
        raise UserError(f"track: sweep '{sweep}' is one of `hqsweep run conf={conf}`; give another name")
    for run in store.runs(sweep):
        try:
            other, manifest = run.config(), run.manifest()
        except Damaged:
            continue
        same = (manifest["arm"], manifest["seed"]) == (arm, config["seed"])
        if same and manifest["run_id"] != run_id(config):
            before, now = other.get("args") or {}, config["args"]
            keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
            apart = ", ".join(f"{key} {before.get(key)} -> {now.get(key)}" for key in keys[:4])
            raise UserError(
                f"track: arm '{arm}' seed {config['seed']} is in '{sweep}' with another config ({apart}), and both"
                f" would be one value; give the arm another name, or delete {run.path}"
            )


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _of_command(seed: int, config: Mapping[str, Any]) -> "TrackedRun":
    """The run of the `hqsweep run` that has started this process."""
    started = int(os.environ[SEED])
    if seed != started:
        raise UserError(
            f"track: seed={seed}, but hqsweep run started this process as seed {started}; pass {{seed}} on to it"
        )
    folder = os.environ.get(RUN_DIR)
    place = Place(arm=os.environ.get(ARM, ""), seed=seed, config=config, path=Path(folder) if folder else None)
    return TrackedRun(_Sent(Path(os.environ[ROWS])), place)


class _Nowhere:
    """Drops everything: of a rank whose rows another rank logs."""

    def row(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def end(self, error: BaseException | None) -> None:
        pass


class _Sent:
    """Sends rows to the job of `hqsweep run`."""

    def __init__(self, path: Path) -> None:
        self.row = partial(send, path)

    def end(self, error: BaseException | None) -> None:
        """Nothing: the job sees the process end."""


class _Folder:
    """Writes rows into the folder of a run, which it holds until the end."""

    def __init__(self, run: RunDir, *, force: bool) -> None:
        self._run, self._stack, self._began = run, ExitStack(), time.monotonic()
        try:
            self._stack.enter_context(run.lock())
        except Busy:
            raise UserError(f"track: {run.sweep}/{run.name}: {holder(run.lock_path)}") from None
        with ExitStack() as held:
            held.push(self._stack)
            before = run.seen()
            if before["state"] == "finished" and not force:
                raise UserError(
                    f"track: {run.sweep}/{run.name} has finished; give force=True to repeat it, or another seed or arm"
                )
            if before["state"] == "finished":
                run.reset()
                before = run.seen()
            self._seconds = float(before["seconds"])
            run.write_status(
                state="running", reason=None, exit_code=None, pid=os.getpid(), host=socket.gethostname(),
                attempt=before["attempt"] + 1, started=time.time(), ended=None, phase=None,
            )  # fmt: skip
            self._tracker = open_tracker(run)
            self._sink = RowSink(run, self._tracker)
            self._sink.manifest(**facts(), command=sys.argv, cwd=os.getcwd(), device="")
            held.pop_all()
        self._rows = Rows(self._sink, None)

    def row(self, step: int, values: Mapping[str, float]) -> None:
        self._rows.row(step, values)

    def end(self, error: BaseException | None) -> None:
        """Finish the run, or mark it failed; seal it, and let the folder go."""
        nothing = None if self._rows.count or error else UserError("track: the block ended and logged nothing")
        outcome: dict[str, Any] = {"state": "finished", "exit_code": 0}
        if isinstance(error, Exception) or nothing:
            with (self._run.log).open("a", encoding="utf-8") as log:
                traceback.print_exception(error or nothing, file=log)
            outcome = {"state": "failed", "reason": reason_of(error or nothing), "exit_code": EXIT_FAILED}
        elif error is not None:
            outcome = {"state": "interrupted", "reason": type(error).__name__, "exit_code": None}
        with self._stack:
            if outcome["state"] == "finished":
                self._sink.write_parquet()
            self._sink.close()
            seconds = round(self._seconds + time.monotonic() - self._began, 3)
            self._run.write_status(**outcome, ended=time.time(), seconds=seconds)
            self._tracker.finish(outcome["exit_code"] or 0)
        if nothing:
            raise nothing


@dataclass(frozen=True, kw_only=True)
class Place:
    """The arm, seed and config of a run, and its folder (None in a process whose rows another one logs)."""

    arm: str
    seed: int
    config: Mapping[str, Any]
    path: Path | None


class TrackedRun:
    """What hqsweep.track returns. arm, seed, config; path: the run's folder, None where another rank logs."""

    def __init__(self, target: Target, place: Place) -> None:
        self._target, self._ended = target, False
        self.arm, self.seed, self.config, self.path = place.arm, place.seed, dict(place.config), place.path

    def log(self, step: int, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Write values of a step: numbers, or tensors of one element. nan and inf are values. The rows are on their way
        to the disk when the call returns. UserError for anything else, and after the end."""
        if self._ended:
            raise UserError(f"track: '{self.arm}' seed {self.seed} has ended; log within its `with` block")
        if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= step.__index__() < 2**63:
            raise UserError(f"track: step={step!r}; it takes a step from 0 on, as in run.log(step, loss=loss)")
        given = {**(values or {}), **more}
        if not given:
            raise UserError("track: log has no value; it takes names, as in run.log(step, loss=loss)")
        self._target.row(step.__index__(), {str(name): number(name, value) for name, value in given.items()})

    def quantization(self, step: int, **options: Any) -> Any:
        """Return hqsweep.nn.quantization with this run's seed, for the random bits of +sr and the histories of delayed
        scaling: `with run.quantization(step): loss.backward()`. options: its other arguments."""
        from hqsweep.nn.core.context import quantization  # with torch

        return quantization(seed=self.seed, step=step, **options)

    def steps(self, first: int, end: int, **options: Any) -> Iterator[int]:
        """Yield the steps first to end - 1; the body of the loop is within quantization(step)."""
        for step in range(first, end):
            with self.quantization(step, **options):
                yield step

    def transformers_callback(self) -> Any:
        """Return a callback for transformers.Trainer, which logs into this run and sets seed and step."""
        from hqsweep.track.callbacks import for_transformers

        return for_transformers(self)

    def lightning_callback(self) -> Any:
        """Return a callback for Lightning's Trainer, which logs into this run and sets seed and step."""
        from hqsweep.track.callbacks import for_lightning

        return for_lightning(self)

    def finish(self, error: BaseException | None = None) -> None:
        """End the run: finished, or by an error failed. The end of the `with` block does this."""
        if not self._ended:
            self._ended = True
            self._target.end(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(error)

    def __repr__(self) -> str:
        return f"<TrackedRun {self.arm} seed {self.seed} in {self.path}>"


def number(name: str, value: Any) -> float:
    """A value as a float. UserError for what is no number."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError("it is text")
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        why = " ".join(str(error).split())[:100]
        raise UserError(
            f"track: {name} is no number ({type(value).__name__}: {why}); give float(x), or x.item()"
        ) from None
