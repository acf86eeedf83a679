"""`hqsweep ls` and `hqsweep show RUN`: each returns what to print and the same facts as a plain dict for --json."""

from collections import Counter
from typing import Any

import yaml
from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from hqsweep.config.fork import ForkConfig
from hqsweep.report.gemm_plans import plan_lines
from hqsweep.report.job_tables import job_tables
from hqsweep.report.text import TextTable, number, sparkline, text, to_rich
from hqsweep.sweep.run_dir import RunDir
from hqsweep.sweep.store import RunStore

STATES = ("finished", "running", "pending", "interrupted", "failed")
WORST = 5


def list_sweeps(store: RunStore) -> tuple[RenderableType, list[dict[str, Any]]]:
    """(table, dicts): per sweep its conf, when it was made, arms, runs (of a fork study trunks, which are no arm, and
    forks), and how many of them are in each state; newest last."""
    sweeps = [_sweep(store, name) for name in store.sweeps()]
    if not sweeps:
        return Text(f"no sweep in {store.root}; `hqsweep run conf=quickstart` makes one"), []
    rows = tuple(
        (
            sweep["sweep"],
            sweep["conf"],
            sweep["created"][:16].replace("T", " "),
            str(len(sweep["arms"])),
            _counted(sweep),
            ", ".join(f"{sweep['states'][state]} {state}" for state in STATES if state in sweep["states"]),
        )
        for sweep in sweeps
    )
    header = ("sweep", "conf", "created (UTC)", "arms", "runs", "states")
    return to_rich(TextTable(header=header, rows=rows, numeric=frozenset({3, 4})), f"sweeps in {store.root}"), sweeps


def _counted(sweep: dict[str, Any]) -> str:
    """The number of runs, of a fork study by what they are."""
    parts = [(sweep["trunks"], "trunk"), (sweep["forks"], "fork")] if sweep["forks"] else []
    return ", ".join(f"{count} {kind}{'s' * (count != 1)}" for count, kind in parts) or str(sweep["runs"])


def _sweep(store: RunStore, name: str) -> dict[str, Any]:
    document, runs = store.facts(name), store.runs(name)
    states = Counter(run.status()["state"] for run in runs)
    sections = [run.fork() for run in runs] if document["study"].get("fork") else []
    trunks = sum(section is not None and section.is_trunk for section in sections)
    return {
        "sweep": name,
        "conf": document["conf"],
        "created": document["created"],
        "overrides": document["overrides"],
        "arms": document["arms"],
        "study": document["study"],
        "runs": states.total(),
        "trunks": trunks,
        "forks": len(sections) - trunks,
        "states": dict(states),
    }


def show_run(run: RunDir) -> tuple[RenderableType, dict[str, Any]]:
    """(page, dict): status, manifest, config, the loss curve as a sparkline, the lowest SQNRs of the last sampled
    step, and the tables of what was checked."""
    config, manifest, status = run.config(), run.manifest(), run.status()
    curve, worst = _loss_curve(run), _worst(run)
    page = {
        "run": run.name,
        "path": str(run.path),
        "status": status,
        "manifest": manifest,
        "config": config,
        "loss": curve,
        "worst_sqnr": worst,
    }
    parts: list[RenderableType] = [Text(f"{run.sweep}/{run.name}", style="bold"), Text(_status_line(status))]
    parts += [Text(line) for line in _place_lines(run.fork())]
    parts += [Text(f"warning: {line}", style="yellow") for line in manifest.get("warnings", [])]
    if curve["values"]:
        ends = f"{number(curve['values'][0])} -> {number(curve['values'][-1])} nats at step {curve['last_step']}"
        parts.append(Text(f"{curve['metric']}  {sparkline(curve['values'])}  {ends}"))
    if worst:
        parts.append(_worst_table(worst))
    parts += job_tables({table: run.rows(table) for table in ("parity", "calibrate")})
    parts += [
        _facts_table(manifest),
        Text("config", style="bold"),
        Syntax(yaml.safe_dump(config, sort_keys=False), "yaml", background_color="default"),
    ]
    return Group(*parts), page


def _status_line(status: dict[str, Any]) -> str:
    progress = status["progress"] or {}
    steps = f", step {progress['step']} of {progress['steps']}" if progress else ""
    speed = f", {number(progress.get('tokens_per_s'), ',.0f')} tokens/s" if progress else ""
    reason = f": {status['reason']}" if status["reason"] else ""
    return f"{status['state']}{reason}{steps}, {number(status['seconds'], '.0f')} s{speed}, attempt {status['attempt']}"


def _place_lines(fork: ForkConfig | None) -> list[str]:
    """Where a run stands in a fork study; nothing of a run from scratch."""
    if fork is None:
        return []
    if fork.is_trunk:
        return [f"trunk: constant rate after {fork.warmup} steps, forked at {', '.join(map(str, fork.at))}"]
    noise = f", its weights times 1 + {fork.noise:g} N(0, 1) there" * bool(fork.noise)
    return [
        f"fork of {fork.trunk_name} at step {fork.start}{noise}: {fork.steps} steps at the constant rate,"
        f" {fork.decay} to rate 0"
    ]


def _loss_curve(run: RunDir) -> dict[str, Any]:
    """The val_loss rows, or train_loss where there are fewer than three of them."""
    rows = run.rows("metrics")
    held_out = [row for row in rows if row["metric"] == "val_loss"]
    chosen = held_out if len(held_out) >= 3 else [row for row in rows if row["metric"] == "train_loss"]
    return {
        "metric": chosen[0]["metric"] if chosen else None,
        "values": [row["value"] for row in chosen],
        "last_step": chosen[-1]["step"] if chosen else None,
    }


def _worst(run: RunDir) -> list[dict[str, Any]]:
    """The quantized tensors of the last sampled step with the lowest SQNR. (GEMM outputs carry the errors of two
    tensors, so that they would always come first.)"""
    rows = [row for row in run.rows("stats") if row["direction"] != "output" and row["sqnr_db"] is not None]
    last = max((row["step"] for row in rows), default=None)
    return sorted((row for row in rows if row["step"] == last), key=lambda row: row["sqnr_db"])[:WORST]


def _worst_table(worst: list[dict[str, Any]]) -> Table:
    rows = tuple(
        (
            row["layer"],
            row["tensor"],
            row["direction"],
            text(row["format"]),
            number(row["sqnr_db"], ".2f"),
            number(row["underflow_pct"], ".2f"),
        )
        for row in worst
    )
    header = ("layer", "tensor", "direction", "format", "SQNR (dB)", "underflow %")
    return to_rich(
        TextTable(header=header, rows=rows, numeric=frozenset({4, 5})), f"lowest SQNR at step {worst[0]['step']}"
    )


def _facts_table(manifest: dict[str, Any]) -> Table:
    if "gemm_plan" in manifest:
        schedule = manifest.get("recipe_schedule", [])
        manifest = manifest | {"gemm_plan": plan_lines(manifest["gemm_plan"], schedule)}
    rows = tuple(
        (name, yaml.safe_dump(value, sort_keys=False, width=160).strip() if isinstance(value, dict) else text(value))
        for name, value in manifest.items()
        if name not in ("recipe_schedule", "warnings")  # gemm_plan says the one, and the other is above
    )
    return to_rich(TextTable(header=("fact", "value"), rows=rows), "manifest")
