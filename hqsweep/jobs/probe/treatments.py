"""Recipes that treat what a probe of the loss has found, as the arms of a fork study.

Each arm is the probed recipe with one change: layers in bf16, the input of the second linear of the MLP in 8 bits, a
scale for each row, blocks scaled to 4 or 6, the random Hadamard transform. A change that the recipe has already, or
that its formats cannot have, gives no arm.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from hqsweep.errors import UserError
from hqsweep.jobs.probe.loss import Causes
from hqsweep.models.convert import gemm_modules_of
from hqsweep.recipe.argument import parse_recipe, recipe_config, recipe_of

MOST_LAYERS = 0.2
"""The most layers, as a share of all, that stay in bf16 because the probe names them."""
ENOUGH = 0.5
"""The share of the increase at which no further layer is named."""
LAST = 0.1
"""The share of the last layers that stay in bf16, beside the first layer."""
EIGHT_BITS = "mxfp8"
Overrides = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Treatment:
    """An arm: its name, the keys that it overrides, and its change in words."""

    name: str
    overrides: Overrides
    why: str

    def whole(self) -> dict[str, Any]:
        """The whole recipe."""
        return self.recipe(recipe_config(recipe_of(self.overrides["recipe"])))

    def recipe(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """The whole recipe, of the config of the probed one."""
        recipe = {**base, "linear": dict(base["linear"])}
        for key, value in self.overrides.items():
            path = key.removeprefix("recipe.").split(".")
            if path[0] == "linear":
                recipe["linear"][path[1]] = value
            elif path[0] == "overrides":
                recipe["overrides"] = value
        return {key: value for key, value in recipe.items() if key != "schedule"}


def converted_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The names of the linears of a plain model that a recipe takes, and the shapes [N, K] of their weights."""
    modules = gemm_modules_of(model, recipe_of("bf16"), head=False, attention=False)
    return {module.name: module.shapes["fprop"][1:] for module in modules if module.module_type == "linear"}


def treatments(causes: Causes, shapes: Mapping[str, Sequence[int]]) -> list[Treatment]:
    """The arms for the causes that a probe has found, the recipe itself first.

    shapes: the names of the converted linears, and the shapes [N, K] of their weights.
    """
    base = recipe_config(recipe_of(causes.recipe))
    found = [Treatment(name=causes.recipe, overrides={"recipe": causes.recipe}, why="the recipe itself")]
    for each in _possible(causes, shapes, base):
        with suppress(UserError):  # such as for a scale for each row, which the recipe's format does not have
            if parse_recipe(each.recipe(base)) != parse_recipe(base):
                found.append(each)
    return found


def _possible(causes: Causes, shapes: Mapping[str, Sequence[int]], base: Mapping[str, Any]) -> Iterator[Treatment]:
    linear, known = base["linear"], list(base["overrides"])

    def arm(suffix: str, why: str, **keys: Any) -> Treatment:
        overrides = {"recipe": causes.recipe, **{f"recipe.{key}": value for key, value in keys.items()}}
        return Treatment(name=f"{causes.recipe}_{suffix}", overrides=overrides, why=why)

    indices = sorted(int(part.name.rpartition(".")[2]) for part in causes.layers)
    if len(indices) > 2:
        last = max(1, math.ceil(LAST * len(indices)))
        ends = [{"layers": choice, "linear": "bf16"} for choice in ("first(1)", f"last({last})")]
        yield arm("ends_bf16", f"the first layer and the last {last} in bf16", overrides=[*known, *ends])
        named = _named(causes)
        if set(named) != {indices[0], *indices[-last:]}:
            chosen = [{"layers": named, "linear": "bf16"}]
            yield arm(
                "worst_bf16",
                f"layers {', '.join(map(str, named))} in bf16, which cost most",
                overrides=[*known, *chosen],
            )
    if (second := _second_linear(shapes)) is not None:
        eight = {"input": EIGHT_BITS, "weight": linear["weight"], "grad_output": _without(linear["grad_output"])}
        yield arm(
            "fc2_8bit", f"the input of {second} in {EIGHT_BITS}", overrides=[*known, {"name": second, "linear": eight}]
        )
    row, column = _both(linear["input"])
    if "row_scaled" not in row:
        yield _linear(arm, "row_scaled", "a scale for each row of the input", input=f"{row}+row_scaled|{column}")
    if "4over6" not in row:
        weight = linear["weight"] if "|" in linear["weight"] else f"{linear['weight']}+4over6"
        yield _linear(
            arm, "4over6", "blocks of the forward scaled to 4 or 6", input=f"{row}+4over6|{column}", weight=weight
        )
    gradient = _both(linear["grad_output"])
    if "rht" not in column or "rht" not in gradient[1]:
        yield _linear(
            arm, "rht", "the random Hadamard transform on both operands of wgrad",
            input=f"{row}|{_with_rht(column)}", grad_output=f"{gradient[0]}|{_with_rht(gradient[1])}",
        )  # fmt: skip


def _linear(arm: Any, suffix: str, why: str, **tensors: str) -> Treatment:
    return arm(suffix, why, **{f"linear.{tensor}": text for tensor, text in tensors.items()})


def _named(causes: Causes) -> list[int]:
    """The layers of the largest shares, until they make up ENOUGH of the sum or are MOST_LAYERS of all."""
    total = sum(max(part.share, 0.0) for part in causes.layers)
    most, sum_of, named = max(1, int(MOST_LAYERS * len(causes.layers))), 0.0, []
    for part in causes.layers[:most]:
        named.append(int(part.name.rpartition(".")[2]))
        sum_of += max(part.share, 0.0)
        if sum_of >= ENOUGH * total:
            break
    return sorted(named)


def _second_linear(shapes: Mapping[str, Sequence[int]]) -> str | None:
    """The glob of the linears in layers with the most input features, if these are more than the outputs."""
    inside = {name: shape for name, shape in shapes.items() if re.search(r"\.\d+\.", name) and shape[1] > shape[0]}
    if not inside:
        return None
    widest = max(inside, key=lambda name: inside[name][1])
    return re.sub(r"\.\d+\.", ".*.", widest)


def _both(text: str) -> tuple[str, str]:
    """The texts of both directions; the transform acts on the columnwise one alone."""
    row, _, column = text.partition("|")
    return re.sub(r"\+rht(\+nosign)?", "", row), column or row


def _with_rht(text: str) -> str:
    return text if "rht" in text else f"{text}+rht"


def _without(text: str) -> str:
    """The quantizer without the transform, for a product whose other operand does not have it."""
    return re.sub(r"\+rht(\+nosign)?", "", text)


def write_study(
    path: Path, causes: Causes, arms: Sequence[Treatment], *, model: str, data: str, losses: Mapping[str, float]
) -> None:
    """Write the fork study of these arms as the YAML of `hqsweep run conf=PATH`. losses: the loss of each at once."""
    study = {
        "defaults": [
            "convergence", {"override model": "hf"}, {"override data": "shards"}, {"override track": "none"}, "_self_"
        ],
        "sweep": re.sub(r"[^A-Za-z0-9._+-]", "_", path.stem),
        "null_arm": True,
        "margin": "1% tokens",
        "model": {"path": model},
        "data": {"path": data},
        "train": {
            "steps": 400, "batch": 16, "context": 512, "lr": 2e-4, "log_every": 5, "eval_batches": 8,
            "checkpoint_every": 200,
        },
        "stats": {"every": 0},
        "engine": {"workers": "auto"},
        "fork": {"at": [200, 400], "steps": 200, "decay": 60},
        "arms": {"bf16": {"recipe": "bf16"}, **{arm.name: dict(arm.overrides) for arm in arms}},
        "hydra": {"sweeper": {"params": {"seed": "range(3)"}}},
    }  # fmt: skip
    lines = [
        f"What treats {causes.recipe} on {Path(model).name}: written by hqsweep probe. hqsweep run conf={path}",
        f"Loss at once on {causes.tokens:,} tokens: bf16 {causes.reference:.4f}",
        *(f"  {arm.name}: {losses[arm.name]:.4f} ({_percent(losses[arm.name], causes)}), {arm.why}" for arm in arms),
    ]
    head = "".join(f"# {line}\n" for line in lines)
    path.write_text(head + yaml.safe_dump(study, sort_keys=False, width=120, default_flow_style=None), encoding="utf-8")


def _percent(loss: float, causes: Causes) -> str:
    return f"{100 * (loss / causes.reference - 1):+.2f} %"
