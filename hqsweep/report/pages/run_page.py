"""`hqsweep show RUN`: a screen on one run, or all of it, and the same content as a plain dict for --json."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import yaml
from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.text import Text

from hqsweep.config.jobs import CHECKED_TABLES
from hqsweep.config.study import ForkConfig
from hqsweep.report.pages.fitted import Fitted
from hqsweep.report.pages.gemm_plans import plan_lines
from hqsweep.report.pages.job_tables import job_tables
from hqsweep.report.pages.text import TextTable, number, sparkline, text, to_rich
from hqsweep.sweep.store import notes
from hqsweep.sweep.store.documents import met_lines
from hqsweep.sweep.store.run_dir import RunDir

WORST = 5
HIGH_PRECISION = "bf16"
"""The quantizer of attention and the head where a recipe does not mention them."""


def show_run(run: RunDir, *, every: bool = False) -> tuple[RenderableType, dict[str, Any]]:
    """(page, dict): state, recipe, the loss curve as a sparkline, the lowest SQNRs of the last sampled step, what was
    checked, and the paths of the files. every: also the tables of what was checked, manifest and config."""
    config, manifest, status = run.config(), run.manifest(), run.status()
    curve, worst = _loss_curve(run), _worst(run)
    checked = {table: rows for table in CHECKED_TABLES if (rows := run.rows(table))}
    page = {
        "run": run.name,
        "path": str(run.path),
        "status": status,
        "manifest": manifest,
        "config": config,
        "loss": curve,
        "worst_sqnr": worst,
    }
    said = notes.of_run(run)
    page["note"], page["tags"] = said.note, list(said.tags)
    parts: list[RenderableType] = [Text(f"{run.sweep}/{run.name}", style="bold"), Text(_status_line(status))]
    parts += [Text(line) for line in (notes.line(said),) if line]
    parts += [Text(line) for line in (*_place_lines(run.fork()), *recipe_lines(config.get("recipe")))]
    parts += [
        Text(f"warning: {line}", style="yellow") for line in [*manifest.get("warnings", []), *met_lines(manifest)]
    ]
    if curve["values"]:
        ends = f"{number(curve['values'][0])} -> {number(curve['values'][-1])} nats at step {curve['last_step']}"
        parts.append(Text(f"{curve['metric']}  {sparkline(curve['values'])}  {ends}"))
    if worst:
        parts.append(_worst_table(worst))
    if not every:
        parts += [Text(counted(table, rows)) for table, rows in checked.items()]
        parts += [Text(line) for line in (_machine_line(manifest), f"files: {run.path}", "--all: manifest and config")]
        return Group(*parts), page
    parts += job_tables(checked)
    parts += [
        _manifest_table(manifest),
        Text("config", style="bold"),
        Syntax(yaml.safe_dump(config, sort_keys=False), "yaml", background_color="default"),
    ]
    return Group(*parts), page


def recipe_lines(recipe: Mapping[str, Any] | None) -> list[str]:
    """The recipe of a config in one to three lines: its quantizers where they are not high precision, then GEMM mode,
    overrides and changes; for a Python factory its name. [] for a job without one."""
    if recipe is None:
        return []
    if recipe.get("qfactory"):
        return [f"recipe {recipe['name']}: a Python factory, {recipe['qfactory']}"]
    parts = ("linear", "grouped_linear", "dpa", "head")
    sections = {part: _section_text(recipe[part]) for part in parts if recipe.get(part)}
    if sections.get("grouped_linear") == sections.get("linear"):
        sections.pop("grouped_linear", None)
    low = [f"{part} {said}" for part, said in sections.items() if part == "linear" or said != HIGH_PRECISION]
    rest = [f"gemm {recipe['gemm']}"] if "gemm" in recipe else []
    rest += [
        f"{len(recipe[key])} {key if len(recipe[key]) > 1 or key == 'schedule' else 'override'}"
        for key in ("overrides", "schedule")
        if recipe.get(key)
    ]
    return [f"recipe {recipe['name']}: {'; '.join([*low, *rest])}"]


def _section_text(section: Mapping[str, str]) -> str:
    """A text such as "mxfp8", or "input nvfp4|mxfp8, weight mxfp8" where tensors differ."""
    tensors: dict[str, list[str]] = {}
    for tensor, quantizer in section.items():
        tensors.setdefault(quantizer, []).append(tensor)
    if len(tensors) == 1:
        return next(iter(tensors))
    return ", ".join(f"{' and '.join(names)} {quantizer}" for quantizer, names in tensors.items())


def counted(table: str, rows: list[dict[str, Any]]) -> str:
    """A text such as "parity: 920 PASS, 2 SKIP"."""
    return f"{table}: " + ", ".join(
        f"{count} {status}" for status, count in Counter(row["status"] for row in rows).items()
    )


def _machine_line(manifest: Mapping[str, Any]) -> str:
    """A line on the machine that it ran on, and its size."""
    versions, commit = manifest.get("versions") or {}, manifest.get("commit")
    parts = [manifest.get("device"), f"torch {versions['torch']}" if versions.get("torch") else None]
    parts += [f"commit {commit[:10]}{' (changed)' if manifest.get('dirty') else ''}" if commit else None]
    parts += [f"{manifest['params']:,} parameters" if "params" in manifest else None]
    parts += [f"{manifest['tokens']:,} tokens ({manifest['epochs']:.2g} epochs)" if "epochs" in manifest else None]
    return ", ".join(part for part in parts if part) or "not started yet"


def _status_line(status: dict[str, Any]) -> str:
    progress = status["progress"] or {}
    steps = f", step {progress['step']} of {progress['steps']}" if progress else ""
    speed = f", {number(progress.get('tokens_per_s'), ',.0f')} tokens/s" if progress else ""
    reason = f": {status['reason']}" if status["reason"] else ""
    return f"{status['state']}{reason}{steps}, {number(status['seconds'], '.0f')} s{speed}, attempt {status['attempt']}"


def _place_lines(fork: ForkConfig | None) -> list[str]:
    """The place of a run in a fork study, as lines; [] for a run from scratch."""
    if fork is None:
        return []
    if fork.is_trunk:
        begun = f"begins from {fork.source}: " * bool(fork.source)
        return [f"trunk: {begun}constant rate after {fork.warmup} steps, forked at {', '.join(map(str, fork.at))}"]
    noise = f", its weights times 1 + {fork.noise:g} N(0, 1) there" * bool(fork.noise)
    return [
        f"fork of {fork.trunk_name} at step {fork.start}{noise}: {fork.steps} steps at the constant rate,"
        f" {fork.decay} to rate 0"
    ]


def _loss_curve(run: RunDir) -> dict[str, Any]:
    """The val_loss rows, or the train_loss rows where there are fewer than three of them."""
    rows = run.rows("metrics")
    held_out = [row for row in rows if row["metric"] == "val_loss"]
    chosen = held_out if len(held_out) >= 3 else [row for row in rows if row["metric"] == "train_loss"]
    return {
        "metric": chosen[0]["metric"] if chosen else None,
        "values": [row["value"] for row in chosen],
        "last_step": chosen[-1]["step"] if chosen else None,
    }


def _worst(run: RunDir) -> list[dict[str, Any]]:
    """The quantized tensors of the last sampled step with the lowest SQNR. (GEMM outputs, which carry the errors of two
    tensors, would always come first.)"""
    rows = [row for row in run.rows("stats") if row["direction"] != "output" and row["sqnr_db"] is not None]
    last = max((row["step"] for row in rows), default=None)
    return sorted((row for row in rows if row["step"] == last), key=lambda row: row["sqnr_db"])[:WORST]


def _worst_table(worst: list[dict[str, Any]]) -> Fitted:
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


def _manifest_table(manifest: dict[str, Any]) -> Fitted:
    if "gemm_plan" in manifest:
        schedule = manifest.get("recipe_schedule", [])
        manifest = manifest | {"gemm_plan": plan_lines(manifest["gemm_plan"], schedule)}
    rows = tuple(
        (name, yaml.safe_dump(value, sort_keys=False, width=160).strip() if isinstance(value, dict) else text(value))
        for name, value in manifest.items()
        if name not in ("recipe_schedule", "warnings", "nonfinite")  # gemm_plan says the first, the others are above
    )
    return to_rich(TextTable(header=("fact", "value"), rows=rows), "manifest")
