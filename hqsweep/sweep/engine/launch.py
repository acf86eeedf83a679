"""The work of `hqsweep run`: words to a checked plan, the plan to run folders, the folders to results.

A plan exists only when every point of the grid is valid, so nothing starts that would stop at its third recipe.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hqsweep.config.command import CommandConfig
from hqsweep.config.job import Config, ConvergenceConfig, parse
from hqsweep.config.jobs import CHECKED_TABLES
from hqsweep.config.study import StudyConfig
from hqsweep.errors import Damaged, UserError
from hqsweep.parallel.mesh import check_devices
from hqsweep.recipe.factories import Importer, factory_name
from hqsweep.sweep.console import Display
from hqsweep.sweep.engine.local import Limits, run_local
from hqsweep.sweep.engine.slurm import check_slurm, run_slurm
from hqsweep.sweep.engine.task import Until
from hqsweep.sweep.engine.trunks import check_twins, linked
from hqsweep.sweep.grid import checks
from hqsweep.sweep.grid.arms import GridPoint
from hqsweep.sweep.grid.checks import check_recipes, check_vocabularies, hashed
from hqsweep.sweep.grid.run_words import Words, each, read
from hqsweep.sweep.grid.study import check_stated
from hqsweep.sweep.store import seen_data
from hqsweep.sweep.store.documents import met_lines
from hqsweep.sweep.store.run_dir import RunDir, unusable
from hqsweep.sweep.store.store import RunStore
from hqsweep.sweep.store.sweep_file import Unsealed
from hqsweep.train import data
from hqsweep.train.build import check_native, pick_device


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A checked grid; the points' configs are canonical, with every leaf, and `configs` the same as objects."""

    conf: str
    words: tuple[str, ...]
    points: tuple[GridPoint, ...]
    configs: tuple[Config, ...]
    study: StudyConfig
    baseline_why: str = ""
    begun: str = ""
    """The source that the trunks of a fork study begin from, "" for random weights."""
    data: tuple[Config, ...] = ()
    """Configs that lead to the data of the runs, with the hashes of the data."""
    same: tuple[str, ...] = ()
    """A line for each arm that quantizes nothing on its model, or that has another arm's operands there."""
    imports: tuple[str, ...] = ()
    """The arguments that name the imported Python factories for its workers."""

    @property
    def first(self) -> Config:
        """The config of the first run, from which keys are read that cannot be swept."""
        return self.configs[0]

    @property
    def heading(self) -> str:
        """The number of runs, in words."""
        if not self.study.fork:
            return counted(len(self.points), "run")
        trunks = sum(config.fork.is_trunk for config in self.configs)
        forks = len(self.points) - trunks
        return f"{len(self.points)} runs: {counted(trunks, 'trunk')} and {counted(forks, 'fork')}"

    @property
    def baseline_line(self) -> str | None:
        """The arm that the others are measured against, and why; None where there is only one."""
        return f"baseline: {self.study.baseline} ({self.baseline_why})" if self.baseline_why else None

    @property
    def lines(self) -> list[str]:
        """The lines about the plan before anything starts."""
        return [line for line in (self.baseline_line, self.begun, self.settles_line, *self.same) if line]

    @property
    def settles_line(self) -> str | None:
        """How long a study of fork.until=settled goes on; None for another."""
        if not self.study.settles:
            return None
        room = f"{counted(self.study.seeds.max, 'trunk')} fit into {self.study.fork.max_steps:,} steps"
        return f"fork.until=settled: more trunks until every gap is known to the margin; {room}"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each run: run (its folder's name), arm, seed, changed, config; in a fork study also point and
        trunk, None for the trunks themselves."""
        rows, names = [], RunStore(Path(self.first.runs_dir)).names(self.first.sweep, self.points)
        for name, point, config in zip(names, self.points, self.configs, strict=True):
            row = {"run": name, "arm": point.arm, "seed": config.seed}
            if self.study.fork:
                row |= {"point": config.start or None, "trunk": config.fork.trunk_name}
            rows.append(row | {"changed": list(point.changed), "config": point.config})
        return rows


def counted(count: int, noun: str) -> str:
    """The count with its noun, such as 1 run, 2 runs."""
    return f"{count} {noun}{'s' * (count != 1)}"


def plan(
    words: Sequence[str],
    *,
    config_dir: Path | None = None,
    workers: int | None = None,
    importer: Importer | None = None,
) -> SweepPlan:
    """Return the plan of `conf=NAME KEY=VALUE...`. `workers` replaces engine.workers.

    Without an importer, Python factories stay names, and such a plan cannot be started.

    Raises:
        UserError: whatever is wrong in any point of the grid.
    """
    return plan_of(read(words, config_dir=config_dir, workers=workers), importer)


def plan_of(words: Words, importer: Importer | None = None) -> SweepPlan:
    """Return the plan of parsed words, as plan() does. UserError for a recipe without a meaning."""
    grid = words.grid
    if importer is not None:
        importer.folders = words.folders
    configs = [hashed(config) for config in each(grid.points, partial(parse, find=importer or factory_name))]
    check_recipes(grid.points, configs)
    configs = seen_data.hashed(configs)
    there, data_of = RunStore(Path(configs[0].runs_dir)).ids(configs[0].sweep), tuple(configs)
    begun = ""
    if grid.study.fork is not None:
        pairs, begun = linked(grid.points, configs, grid.study.fork, there)
        typed, configs = zip(*pairs, strict=True)
    else:
        configs = [seen_data.of_before(config, there) for config in configs]
        typed = [replace(p, config=c.model_dump(mode="json")) for p, c in zip(grid.points, configs, strict=True)]
    check_twins(typed)
    fields = {
        "begun": begun,
        "data": data_of,
        "same": checks.repeat_lines(typed, configs, grid.study.baseline),
        "conf": words.conf,
        "words": words.overrides,
        "study": grid.study,
        "baseline_why": grid.baseline_why,
    }
    fields["imports"] = tuple(importer.arguments) if importer is not None else ()
    return SweepPlan(points=tuple(typed), configs=tuple(configs), **fields)


def check(plan: SweepPlan) -> None:
    """Raise UserError for everything that start() would refuse, before it starts.

    These are: a device or data that this machine lacks, data too short for train.context, and a study that began with
    other settings.
    """
    if plan.first.engine.kind == "local":
        for config in plan.configs:
            _check_device(config)
        trainings = [config for config in plan.configs if isinstance(config, ConvergenceConfig)]
        check_vocabularies(trainings)
        for source, context in dict.fromkeys((config.data, config.train.context) for config in trainings):
            data.check_length(source, context)
    else:
        check_slurm(Path(plan.first.runs_dir) / plan.first.sweep)
    check_data(plan)
    try:
        check_stated(RunStore(Path(plan.first.runs_dir)), plan.first.sweep, plan.study)
    except Unsealed:
        raise
    except Damaged:  # a list of runs that start() makes again
        pass


def check_data(plan: SweepPlan) -> None:
    """Raise UserError if the sweep has runs that have read other data than the present files."""
    seen_data.check_data(RunStore(Path(plan.first.runs_dir)), plan.first.sweep, plan.data)


def folders(plan: SweepPlan, say: Callable[[str], None] = lambda line: None) -> list[RunDir]:
    """The folders of the plan's runs, in grid order, made where they are missing. `say` gets a line for each repair."""
    first, study = plan.first, plan.study.model_dump(mode="json")
    listed = {"sweep": first.sweep, "conf": plan.conf, "overrides": plan.words, "study": study}
    return RunStore(Path(first.runs_dir)).create(**listed, runs=plan.points, say=say)


def start(plan: SweepPlan, display: Display, *, force: bool = False, until: Until | None = None) -> list[RunDir]:
    """Make the folders, bring every run to an end (or only submit it, if the engine is to detach), and return the
    folders in grid order. `until`: the time until which runs start. UserError for one with Slurm."""
    if until is not None and plan.first.engine.kind == "slurm":
        raise UserError(
            f"{until.name}: it is of engine=local, which starts the runs itself; give Slurm's jobs their time by"
            " engine.slurm.time_min"
        )
    store = RunStore(Path(plan.first.runs_dir))
    store.mend(plan.first.sweep, display.say)
    check(plan)
    runs, engine = folders(plan, display.say), plan.first.engine
    trainings = [pair for pair in zip(runs, plan.configs, strict=True) if isinstance(pair[1], ConvergenceConfig)]
    display.expect({run.name: config.own_steps for run, config in trainings})
    limits = engine.model_dump(exclude={"kind", "slurm", "runs_per_gpu", "gpus_per_run"}) | {"imports": plan.imports}
    ranks = max((config.train.parallel.world for _, config in trainings), default=1)
    ordered = work_order(plan, runs)
    if engine.kind == "slurm":
        run_slurm(ordered, slurm=engine.slurm.model_dump(), display=display, force=force, ranks=ranks, **limits)
    else:
        if engine.workers == "auto":
            from hqsweep.sweep.engine.auto_workers import runs_at_a_time  # with all of a training

            todo = [config for run, config in zip(runs, plan.configs, strict=True) if force or not _is_finished(run)]
            limits["workers"] = runs_at_a_time(todo, plan.imports, display.say)
        for run in runs:
            run.job_path.unlink(missing_ok=True)
        gpus = (engine.gpus_per_run or ranks) if ranks > 1 else None
        limits = Limits(runs_per_gpu=engine.runs_per_gpu, gpus_per_run=gpus, until=until, **limits)
        run_local(ordered, display=display, limits=limits, force=force)
    return runs


def _is_finished(run: RunDir) -> bool:
    return run.seen()["state"] == "finished"


def work_order(plan: SweepPlan, runs: Sequence[RunDir]) -> list[RunDir]:
    """The runs, given in grid order, in the order in which they start. In a fork study every trunk is followed by its
    own forks: point by point, at each point the baseline, the null arm, then the others. So each trunk that is
    finished answers for every arm."""
    if not plan.study.fork:
        return list(runs)
    keys = [(config.fork.trunk_name or run.name, config.seed) for run, config in zip(runs, plan.configs, strict=True)]
    trunks = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    places = [
        (trunks[key], config.start, _rank(point, config, plan.study.baseline))
        for key, point, config in zip(keys, plan.points, plan.configs, strict=True)
    ]
    return [run for _, run in sorted(zip(places, runs, strict=True), key=lambda pair: pair[0])]


def _rank(point: GridPoint, config: ConvergenceConfig, baseline: str | None) -> int:
    """The place of a fork among its point's: of the baseline 0, of the null arm 1, of any other 2."""
    if config.fork.noise:
        return 1
    return 0 if baseline in (point.arm, point.variant, config.recipe.name) else 2


def _check_device(config: Config) -> None:
    """Raise UserError if this machine, which will run the run, lacks its GPU or tensor cores."""
    if isinstance(config, CommandConfig):
        return  # the program looks for its device itself
    section = "train" if isinstance(config, ConvergenceConfig) else config.job
    wanted = getattr(config, section).device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{section}.device: 'cuda', but this machine has no CUDA device; use cpu, or auto for either")
    if isinstance(config, ConvergenceConfig):
        device = pick_device(wanted)
        config.train.check_compile(on_gpu=device.type == "cuda")
        check_devices(config.train.parallel, device.type, config.engine.gpus_per_run)
        check_native(config, device, config.data.vocab_estimate)


def result(run: RunDir) -> dict[str, Any]:
    """The summary of one run: run, arm, seed, point (None except for a fork), state, val_loss (nats, last one or None),
    tokens_per_s, seconds, reason, path, warnings (also about damage), and for a parity or calibrate run the numbers of
    rows with PASS, FAIL and SKIP. For a run that is damaged or missing only the fields that are known have values."""
    try:
        status, manifest = run.status(), run.manifest()
        rows = {table: run.rows(table) for table in ("metrics", *CHECKED_TABLES)}
    except Damaged as fault:
        status, manifest, rows = unusable(fault), {}, {table: [] for table in ("metrics", *CHECKED_TABLES)}
    losses = [row["value"] for row in rows["metrics"] if row["metric"] == "val_loss"]
    return {
        "run": run.name, "arm": manifest.get("arm"), "seed": manifest.get("seed"), "point": manifest.get("point"),
        "state": status["state"],
        "val_loss": losses[-1] if losses else None, "tokens_per_s": (status["progress"] or {}).get("tokens_per_s"),
        "seconds": status["seconds"], "reason": status["reason"], "path": str(run.path),
        "warnings": [
            *manifest.get("warnings", []),
            *(f"{run.name}: {line}" for line in (*manifest.get("repairs", []), *met_lines(manifest))),
        ],
        **{table: dict(Counter(row["status"] for row in rows[table])) for table in CHECKED_TABLES},
    }  # fmt: skip
