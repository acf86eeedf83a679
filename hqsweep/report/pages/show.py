"""`hqsweep show RUN`: the page of a run for a terminal, and the same content for --json."""

from collections import Counter
from collections.abc import Mapping
from statistics import mean, median
from typing import Any

import yaml
from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.text import Text

from hqsweep.config.jobs import CHECKED_TABLES, COMMAND
from hqsweep.config.study import ForkConfig
from hqsweep.report.pages.checks import job_tables
from hqsweep.report.pages.gemm_plans import plan_lines
from hqsweep.report.pages.text import Fitted, TextTable, number, sparkline, text, to_rich
from hqsweep.sweep.store import edits
from hqsweep.sweep.store.documents import met_lines
from hqsweep.sweep.store.run_dir import RunDir

WORST = 5
HIGH_PRECISION = "bf16"
"""The quantizer of attention and the head where a recipe does not mention them."""


def show_run(run: RunDir, *, every: bool = False) -> tuple[RenderableType, dict[str, Any]]:
    """Return (page, dict) of a run.

    It has the state, the recipe, the loss curve as a sparkline, the lowest SQNRs of the last sampled step, counts of
    checks, and the paths of the files. every: also the tables of checks, manifest and config.
    """
    config, manifest, status = run.config(), run.manifest(), run.status()
    curve, worst = _loss_curve(run, config), _worst(run)
    checked = {table: rows for table in CHECKED_TABLES if (rows := run.rows(table))}
    page = {
        "run": run.name,
        "path": str(run.path),
        "status": status,
        "manifest": manifest,
        "config": config,
        "loss": curve,
        "worst_sqnr": worst,
        "what_if": (what_if := _what_if(run)),
        "exact_tiles": (exact := _exact_tiles(run)),
    }
    said = edits.of_run(run)
    page["note"], page["tags"] = said.note, list(said.tags)
    parts: list[RenderableType] = [Text(f"{run.sweep}/{run.name}", style="bold"), Text(_status_line(status))]
    parts += [Text(line) for line in (edits.line(said),) if line]
    parts += [Text(line) for line in (*_place_lines(run.fork()), *recipe_lines(config.get("recipe")))]
    parts += [
        Text(f"warning: {line}", style="yellow") for line in [*manifest.get("warnings", []), *met_lines(manifest)]
    ]
    if curve["values"]:
        unit = "" if config["job"] == COMMAND else " nats"
        ends = f"{number(curve['values'][0])} -> {number(curve['values'][-1])}{unit} at step {curve['last_step']}"
        parts.append(Text(f"{curve['metric']}  {sparkline(curve['values'])}  {ends}"))
    if worst:
        parts.append(_worst_table(worst))
    if what_if:
        parts.append(_what_if_table(what_if))
    parts += [Text(line) for line in map(_exact_line, exact)]
    if not every:
        parts += [Text(counted(table, rows)) for table, rows in checked.items()]
        lines = (_machine_line(manifest), system_line(manifest.get("system") or {}))
        parts += [Text(line) for line in (*filter(None, lines), f"files: {run.path}", "--all: manifest and config")]
        return Group(*parts), page
    parts += job_tables(checked)
    parts += [
        _manifest_table(manifest),
        Text("config", style="bold"),
        Syntax(yaml.safe_dump(config, sort_keys=False), "yaml", background_color="default"),
    ]
    return Group(*parts), page


def recipe_lines(recipe: Mapping[str, Any] | None) -> list[str]:
    """Return the recipe of a config in one to three lines; [] for a job without one.

    The lines have quantizers outside high precision, then GEMM mode, overrides and changes; for a Python factory its
    name.
    """
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
    said = "; ".join([*low, *rest])
    return [f"recipe {recipe['name']}" + f": {said}" * bool(said)]


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


USES = {
    "cpu_pct_mean": ("CPU", ".0f", 1, " %"), "memory_bytes_max": ("memory", ".2f", 1e9, " GB"),
    "gpu_pct_mean": ("GPU", ".0f", 1, " %"), "gpu_memory_bytes_max": ("GPU memory", ".2f", 1e9, " GB"),
    "gpu_watts_mean": ("power", ".0f", 1, " W"), "joules_per_token": ("energy", ".3g", 1, " J a token"),
}  # fmt: skip
"""Key of the manifest's "system" -> (word, format, divisor, unit)."""


def system_line(system: Mapping[str, float]) -> str:
    """A line on the use of the machine: means, and the most memory; "" where nothing was measured."""
    said = [
        f"{word} {number(system[key] / divisor, spec)}{unit}"
        for key, (word, spec, divisor, unit) in USES.items()
        if key in system
    ]
    return f"use: {', '.join(said)}" if said else ""


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


def _loss_curve(run: RunDir, config: Mapping[str, Any]) -> dict[str, Any]:
    """The val_loss rows, or the train_loss rows where there are fewer than three of them; of a command the rows of the
    metric that is judged, or of its first one."""
    rows = run.rows("metrics")
    if config["job"] == COMMAND:
        logged = list(dict.fromkeys(row["metric"] for row in rows))
        asked = (config.get("judge") or {}).get("metric")
        metric = next((name for name in (asked, "val_loss", *logged) if name in logged), None)
        rows = [row for row in rows if row["metric"] == metric]
        return {
            "metric": metric,
            "values": [row["value"] for row in rows],
            "last_step": rows[-1]["step"] if rows else None,
        }
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


def _what_if(run: RunDir) -> list[dict[str, Any]]:
    """The median SQNR over the layers at the last sampled step, in the run's own format of a slot and in the formats of
    stats.what_if: tensor, direction, own (the run's format), format, sqnr_db. Layers of other own formats stand
    apart."""
    others = run.rows("what_if")
    last = max((row["step"] for row in others), default=None)
    own = {_slot(row): row for row in run.rows("stats") if row["step"] == last and row["direction"] != "output"}
    found: dict[tuple[str, str, str, str], list[float]] = {}
    for row in (*own.values(), *(row for row in others if row["step"] == last)):
        if row["sqnr_db"] is not None and (mine := own.get(_slot(row))):
            found.setdefault((row["tensor"], row["direction"], mine["format"], row["format"]), []).append(
                row["sqnr_db"]
            )
    names = ("tensor", "direction", "own", "format")
    return [{**dict(zip(names, key, strict=True)), "sqnr_db": median(each)} for key, each in found.items()]


def _exact_tiles(run: RunDir) -> list[dict[str, Any]]:
    """The shares of the tiles of projected weights that their host encodes exactly, in percent, at the last sampled
    step: direction, mean over the layers, the least of them, and its layer."""
    rows = [row for row in run.rows("stats") if row.get("exact_tiles_pct") is not None]
    last = max((row["step"] for row in rows), default=None)
    found: dict[str, list[tuple[float, str]]] = {}
    for row in rows:
        if row["step"] == last:
            found.setdefault(row["direction"], []).append((row["exact_tiles_pct"], row["layer"]))
    return [
        {
            "direction": direction,
            "mean": mean(pct for pct, _ in each),
            **dict(zip(("least", "layer"), min(each), strict=True)),
        }
        for direction, each in found.items()
    ]


def _exact_line(share: dict[str, Any]) -> str:
    """A line such as "projected weights, rowwise: 100 % of tiles exact, at least 100 % (layers.0.mlp.fc1)"."""
    average, least = number(share["mean"], ".4g"), number(share["least"], ".4g")
    return f"projected weights, {share['direction']}: {average} % of tiles exact, at least {least} % ({share['layer']})"


def _slot(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["layer"], row["tensor"], row["direction"]


def _what_if_table(rows: list[dict[str, Any]]) -> Fitted:
    """A line a slot, a column a format."""
    sqnr = {(row["tensor"], row["direction"], row["own"], row["format"]): row["sqnr_db"] for row in rows}
    slots = sorted({key[:3] for key in sqnr}, key=lambda slot: (slot[2], slot[0], slot[1] != "rowwise"))
    formats = list(dict.fromkeys(row["format"] for row in rows if row["format"] != row["own"]))
    lines = (
        (
            *slot,
            number(sqnr.get((*slot, slot[2])), ".2f"),
            *(number(sqnr.get((*slot, each)), ".2f") for each in formats),
        )
        for slot in slots
    )
    header = ("tensor", "direction", "format", "SQNR (dB)", *formats)
    numeric = frozenset(range(3, len(header)))
    return to_rich(TextTable(header=header, rows=tuple(lines), numeric=numeric), "median SQNR, in other formats too")


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
