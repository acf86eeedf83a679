"""The run store: every path of a sweep and of a run is made here.

    <runs_dir>/<sweep>/sweep.json          name, conf, overrides, runs (names in grid order), arms, created, study
    <runs_dir>/<sweep>/<run>/              one folder per run: class run_dir.RunDir

A run's name ends in its id, the hash of everything in the resolved config that can change a number. So the same
command finds the same folders again, and a changed learning rate is another run.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import yaml

from hqsweep.errors import Damaged, UserError, nearest
from hqsweep.host import Busy, holder, locked
from hqsweep.sweep.store import seal, sweep_file
from hqsweep.sweep.store.files import write_text
from hqsweep.sweep.store.names import fork_of, id_in, run_id, run_name, trunk_path
from hqsweep.sweep.store.run_dir import PENDING, RunDir, repair
from hqsweep.train.record import discard, fault_of, is_point

MOVE = "move it away, or run the sweep's `hqsweep run` command, which takes in what is a run of it"
"""The remedy for a folder that is not in the list of its sweep."""
SOME = 8
"""The number of names in a message."""
INDEX = ".query"
"""The folder of a sweep with the index of its rows, which queries make."""
LOCK_WAIT_S = 60.0
"""The seconds to wait for the process that changes the sweep's list of runs."""


class PlannedRun(Protocol):
    """One run as the grid expansion gives it."""

    config: Mapping[str, Any]
    """The resolved config as a plain dict."""
    arm: str
    """The label of the recipe in this sweep."""
    overrides: Sequence[str]
    """The overrides that lead from the sweep's config to this run."""


@dataclass(frozen=True)
class RunStore:
    """All sweeps under one folder (`runs_dir`)."""

    root: Path

    def create(
        self,
        *,
        sweep: str,
        conf: str,
        overrides: Sequence[str],
        runs: Iterable[PlannedRun],
        study: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> list[RunDir]:
        """Return the folders of these runs, in grid order; make missing ones.

        Repeating a call changes nothing; a call with other runs adds them to the sweep. study: the keys of the sweep as
        a whole, StudyConfig as JSON; None keeps the present ones. An ended run that is damaged is pending again, an
        interrupted one is repaired (repair()), and a damaged list of runs is made again from the folders. `say` gets a
        line on each.

        UserError for a sweep name that is no plain folder name, for a folder that cannot be written, and for a sweep of
        an earlier version, which had no checksum.
        """
        if not re.fullmatch(r"[A-Za-z0-9._+-]*[A-Za-z0-9_+-]", sweep):
            raise UserError(f"sweep: '{sweep}' is not a folder name; use letters, digits and any of . _ + -")
        try:
            (self.root / sweep).mkdir(parents=True, exist_ok=True)
            with self.lock(sweep, say):
                listed = {"conf": conf, "overrides": list(overrides), "study": study}
                return self._create(self.root / sweep, listed, list(runs), say)
        except OSError as error:
            raise UserError(
                f"runs_dir: nothing can be written in {self.root / sweep} ({error.strerror}); make room or give the"
                " right to write there, or choose another folder with runs_dir=FOLDER"
            ) from None

    def mend(self, sweep: str, say: Callable[[str], None]) -> None:
        """Rebuild a sweep's damaged list of runs from its folders, and report it to `say`. Raises UserError as create()
        does."""
        folder = self.root / sweep
        if not folder.is_dir():
            return
        with self.lock(sweep, say):
            known_list = _known(folder, say)
            if known_list["runs"] and "created" not in known_list:
                now = datetime.now(UTC).isoformat()
                blank = {"name": sweep, "conf": "", "overrides": [], "created": now, "study": {}}
                sweep_file.write(folder, blank | known_list)

    def keep(self, sweep: str) -> bool:
        """Put the unchanged list of a sweep of an earlier version under a checksum; returns whether it had none."""
        with self.lock(sweep):
            try:
                sweep_file.read(self.root / sweep)
            except sweep_file.Unsealed as fault:
                sweep_file.write(self.root / sweep, fault.facts)
                return True
            return False

    @contextmanager
    def lock(self, sweep: str, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
        """Hold the lock of the sweep's list of runs, for a moment. `say` gets a line on another holder, if the wait is
        long. Raises UserError where that process is stopped, or holds it for LOCK_WAIT_S."""
        path = self.root / sweep / ".lock"
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(path, LOCK_WAIT_S, say))
            except Busy:
                raise UserError(f"sweep '{sweep}': nothing can be added to its list of runs: {holder(path)}") from None
            yield

    def _create(
        self, folder: Path, listed: dict[str, Any], points: Sequence[PlannedRun], say: Callable[[str], None]
    ) -> list[RunDir]:
        """Create the folders. listed: the entries of sweep.json beside the runs."""
        old = {"created": datetime.now(UTC).isoformat()} | _known(folder, say)
        names = self.names(folder.name, points)
        named = dict(zip(names, points, strict=True))
        for name in named:
            repair(RunDir(folder / name), say)
            _take_back_if_damaged(RunDir(folder / name), say)
        arms = _arms([RunDir(folder / name) for name in names], points)
        forks = [(RunDir(folder / name), fork) for name, p in named.items() if (fork := fork_of(p.config))]
        trunks = {run.name for run, fork in forks if fork.is_trunk}
        needed = {run: trunk_path(named[run.name].config, run.path) for run, fork in forks if not fork.is_trunk}
        needed = {path for run, path in needed.items() if not run.has_finished()}
        run_dirs = [_create_run(RunDir(folder / name), p, arms[p.arm], needed) for name, p in named.items()]
        sweep_file.write(folder, {
            "name": folder.name, **listed,
            "runs": list(dict.fromkeys([*old["runs"], *named])),
            "arms": list(dict.fromkeys([*old["arms"], *(arms[p.arm] for n, p in named.items() if n not in trunks)])),
            "created": old["created"],
            "study": old.get("study", {}) if listed["study"] is None else listed["study"],
        })  # fmt: skip
        return run_dirs

    def sweeps(self) -> list[str]:
        """The names of the sweeps, the last created one last."""
        return list(self._lists())

    def _lists(self) -> dict[str, dict[str, Any] | Damaged]:
        """Name -> facts() of each sweep, or their fault, the last created one last."""
        if not self.root.is_dir():
            return {}
        lists: dict[str, dict[str, Any] | Damaged] = {}
        for name in os.listdir(self.root):
            if os.path.isfile(f"{self.root}/{name}/{sweep_file.FILE}"):
                try:
                    lists[name] = self.facts(name)
                except Damaged as fault:
                    lists[name] = fault
        unknown = "unknown"  # after all years
        created = {n: unknown if isinstance(facts, Damaged) else facts["created"] for n, facts in lists.items()}
        return {name: lists[name] for name in sorted(lists, key=lambda name: (created[name], name))}

    def facts(self, sweep: str) -> dict[str, Any]:
        """The content of sweep.json; study is {} in an older one. Raises Damaged where it is missing, or is not what
        create() wrote."""
        document = sweep_file.read(self.root / sweep)
        if document is None:
            raise Damaged(self.root / sweep / sweep_file.FILE, "is gone", sweep_file.REWRITE)
        return document

    def names(self, sweep: str, points: Iterable[PlannedRun]) -> list[str]:
        """The names of these runs; a run that the sweep has or had keeps its name, by its id, whatever its arm was
        called then."""
        folder, there = self.root / sweep, self.ids(sweep)
        new = [run_name(point.config, point.arm) for point in points]
        return [name if (folder / name).is_dir() else there.get(id_in(name), name) for name in new]

    def ids(self, sweep: str) -> dict[str, str]:
        """The end of its id -> the name of each run that the sweep has or had."""
        folder = self.root / sweep
        entries = os.scandir(folder) if folder.is_dir() else ()
        there = {id_in(entry.name): entry.name for entry in entries if entry.is_dir()}
        with suppress(Damaged):
            there |= {id_in(run.name): run.name for run in self.runs(sweep)}
        return there

    def runs(self, sweep: str) -> list[RunDir]:
        """The sweep's runs in grid order, also those without a folder; [] for an unknown sweep."""
        return runs_in(self.root / sweep)

    def all_runs(self) -> list[RunDir]:
        """The runs of all sweeps. Raises UserError where there is no sweep."""
        lists = self._lists()
        if not lists:
            raise UserError(f"runs_dir: no sweep in {self.root}; `hqsweep run conf=quickstart` makes one")
        if faults := [facts for facts in lists.values() if isinstance(facts, Damaged)]:
            raise faults[0]
        return [RunDir(self.root / sweep / name) for sweep, facts in lists.items() for name in facts["runs"]]

    def _whole_runs(self, sweep: str) -> list[RunDir]:
        """The sweep's runs; [] for a sweep whose list is damaged."""
        with suppress(Damaged):
            return self.runs(sweep)
        return []

    def resolve(self, words: Sequence[str]) -> list[RunDir]:
        """The runs that a user means, each once, in the order asked for.

        A word is the path of a run's or a sweep's folder, the name of a sweep, or the beginning of a run's name, also
        as SWEEP/BEGINNING, which means all runs that begin so (`nvfp4` is the recipe nvfp4, and nvfp4_2d only when
        there is no nvfp4).
        Raises UserError, with the nearest names, for a word that fits nothing.
        """
        selected = [run for word in words for run in self._resolve_word(word)]
        return list({run.path.resolve(): run for run in selected}.values())

    def one(self, word: str) -> RunDir:
        """The run that a user means. Raises UserError as resolve(), and where these are several."""
        runs = self.resolve([word])
        if len(runs) > 1:
            names, more = [f"{run.sweep}/{run.name}" for run in runs[:SOME]], len(runs) - SOME
            listed = ", ".join(names) + (f" and {more} more" if more > 0 else "")
            raise UserError(f"'{word}' means {len(runs)} runs; name one of {listed}")
        return runs[0]

    def sweep_path(self, word: str) -> Path | None:
        """The folder of the sweep that a word names, by its name or its path; None where it names none."""
        folders = (Path(word), self.root / word)
        return next((folder for folder in folders if word and sweep_file.is_sweep(folder)), None)

    def _resolve_word(self, word: str) -> list[RunDir]:
        for folder in (Path(word), self.root / word):
            if folder.is_file():
                raise UserError(f"'{word}' is a file; give the name or the folder of a sweep or a run of hqsweep")
            if (folder / "config.yaml").is_file():
                return [RunDir(folder)]
            if runs := runs_in(folder):
                return runs
            if folder.is_dir() and sweep_file.read(folder) is None and sweep_file.present(folder):
                raise Damaged(folder / sweep_file.FILE, "is gone", sweep_file.REWRITE)
        sweeps = self.sweeps()
        named = [run for sweep in sweeps for run in self._whole_runs(sweep)]
        within, _, beginning = word.rpartition("/")
        folder = self.sweep_path(within)
        candidates = runs_in(folder) if folder else [] if within else named
        for start in (f"{beginning}-", beginning):
            if runs := [run for run in candidates if run.name.startswith(start)]:
                return runs
        names = [run.name for run in candidates or named]
        recipes = [re.sub(r"-s\d+(-at\d+)?-[0-9a-f]{10}$", "", name) for name in names]
        if folder:
            hint = nearest(beginning, [*recipes, *names]).replace("mean '", f"mean '{within}/")
        else:
            hint = nearest(word, [*sweeps, *recipes, *names])
        raise UserError(f"'{word}' is no run or sweep in {self.root} and no folder{hint}; `hqsweep ls` lists them")


def _arms(runs: Sequence[RunDir], points: Sequence[PlannedRun]) -> dict[str, str]:
    """Arm of the plan -> its name. Where an earlier version of the sweep has labelled finished runs otherwise, the arm
    takes their name, so that its seeds stay together."""
    arms = {point.arm: point.arm for point in points}
    for run, point in zip(runs, points, strict=True):
        if arms[point.arm] == point.arm and run.path.name != run_name(point.config, point.arm):
            with suppress(UserError):  # damaged files are named where their numbers are read
                arms[point.arm] = run.manifest().get("arm", point.arm) if run.has_finished() else point.arm
    return arms


def _known(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """The content of sweep.json, or sweep_file.rebuilt() where it is damaged."""
    try:
        document = sweep_file.read(folder)
    except sweep_file.Unsealed:
        raise
    except Damaged as fault:
        say(f"{fault.file} {fault.fault}; it is made again from the folders that are there")
        document = None
    return sweep_file.rebuilt(folder) if document is None else document


def _take_back_if_damaged(run: RunDir, say: Callable[[str], None]) -> None:
    """Make a run pending that has ended and has changed since."""
    if not run.path.is_dir():
        return
    with suppress(Busy), run.lock():
        try:
            run.check()
        except Damaged as fault:
            say(f"{run.name}: {Path(fault.file).name} {fault.fault}; the run is repeated")
            run.reset()


def _create_run(run: RunDir, point: PlannedRun, arm: str, needed: Collection[Path] = ()) -> RunDir:
    """Write config, manifest and status of a run. A finished or active run keeps its own.

    Another run takes the new config, which can differ only in keys that cannot change a number (track, engine).

    needed: checkpoints that forks wait for. Anything else in the place of one is deleted. A finished trunk that lacks
    one is pending again, and keeps its other points.
    """
    run.path.mkdir(exist_ok=True)
    with suppress(Busy), run.lock():
        config, fork = dict(point.config), fork_of(point.config)
        if fork and fork.is_trunk:
            config = _with_points_of(run, config)
            states = [path for path in needed if path.parent == run.checkpoint]
            damaged = {path: fault for path in states if path.exists() and (fault := fault_of(path, run_id(config)))}
            if run.has_finished() and (damaged or not all(map(is_point, states))):
                run.write_status(**PENDING | {"seconds": run.written_status()["seconds"]})
            for path, fault in damaged.items():
                run.note_repair(f"{fault}; the trunk was trained again to that point")
                discard(path)
        if not run.has_finished():
            seal.remove(run.path)  # of a failed run, whose config and manifest are written anew
            write_text(run.config_path, yaml.safe_dump(config, sort_keys=False, width=120))
            forked = {} if fork is None or fork.is_trunk else {"trunk": fork.trunk_name, "point": fork.start}
            run.update_manifest(
                run_id=run_id(point.config), sweep=run.sweep, arm=arm, seed=point.config["seed"],
                job=point.config["job"], overrides=list(point.overrides), **forked,
            )  # fmt: skip
        if not run.status_path.exists():
            run.write_status()
    return run


def _with_points_of(run: RunDir, config: dict[str, Any]) -> dict[str, Any]:
    """The config of a trunk, with the points that it was made for before."""
    before = None
    with suppress(Damaged):  # which is written anew
        before = run.fork()
    points = sorted({*config["fork"]["at"], *(before.at if before else ())})
    return config | {
        "fork": config["fork"] | {"at": points}, "train": config["train"] | {"steps": max(points)},
    }  # fmt: skip


def runs_in(sweep_path: Path) -> list[RunDir]:
    """The runs of a sweep's folder by sweep.json, in its order; [] without one."""
    document = sweep_file.read(sweep_path)
    return [] if document is None else [RunDir(sweep_path / name) for name in document["runs"]]


def foreign(sweep_path: Path, listed: Sequence[RunDir] | None = None) -> list[RunDir]:
    """The folders in a sweep's folder that look like runs and are not in its list, by name. listed: runs_in() of it."""
    names = {run.name for run in (runs_in(sweep_path) if listed is None else listed)}
    return [RunDir(sweep_path / name) for name in sorted(sweep_file.present(sweep_path) - names)] if names else []


def known(runs: Iterable[RunDir]) -> tuple[list[RunDir], list[RunDir]]:
    """(runs, folders among them that their sweep does not list); where all runs of a sweep are given, all folders in it
    that it does not list. A folder beside no sweep.json is a run. Raises Damaged for a damaged sweep.json."""
    runs = list(runs)
    asked: dict[str, set[str]] = {}
    for folder, name in (os.path.split(run.path) for run in runs):
        asked.setdefault(folder, set()).add(name)
    strangers: dict[str, RunDir] = {}
    for folder, names in asked.items():
        document = sweep_file.read(Path(folder))
        listed = set(document["runs"]) if document else set()
        is_whole = names >= listed
        others = sweep_file.present(Path(folder), apart=listed) if listed else ()
        found = [RunDir(Path(folder, name)) for name in sorted(others) if is_whole or name in names]
        strangers |= {str(run.path): run for run in found}
    return [run for run in runs if str(run.path) not in strangers], list(strangers.values())
