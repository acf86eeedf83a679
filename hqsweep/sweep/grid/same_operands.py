"""Arms of a grid that quantize nothing on their model, or that get the operands of another arm there. They are named
before anything starts: their runs would repeat the other arm's, and an equal loss would say nothing of the recipe.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hqsweep.config.job import Config, ConvergenceConfig
from hqsweep.config.model import TARGET, ModelConfig
from hqsweep.recipe.applied import TABLES, Applied, applied, asks, why_nothing
from hqsweep.recipe.products import GemmModule
from hqsweep.sweep.grid.point import GridPoint, is_trunk, section
from hqsweep.sweep.store.names import NOT_IN_ID

REMEDY = "Leave the arm out, or quantize what this model has"
FIRST = 4
"""The number of arms that a line names; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """An arm of a grid. settings: the config of its first run without recipe and seed. applied: None where its model
    or recipe is not known, as a Python function that is not imported here makes it."""

    name: str
    point: GridPoint
    config: ConvergenceConfig
    settings: str
    modules: tuple[GemmModule, ...] = ()
    applied: Applied | None = None

    @property
    def is_vain(self) -> bool:
        """Whether its recipe asks for low precision, and gives none to this model."""
        return self.applied is not None and not self.applied.quantizes and bool(asks(self.config.recipe.build()))


def lines(points: Sequence[GridPoint], configs: Sequence[Config], baseline: str | None) -> tuple[str, ...]:
    """A line for each arm that quantizes nothing on its model, or that has the operands of another arm at the same
    settings; and one line for arms whose operands are unknown. baseline: the arm or recipe that others are measured
    against."""
    arms = _arms(points, configs)
    said = [f"warning: {line}" for line in _known([arm for arm in arms if arm.applied is not None], baseline)]
    unknown = [arm for arm in arms if arm.applied is None and asks(arm.config.recipe.build())]
    if unknown:
        key = f"model.{TARGET}" if getattr(unknown[0].config.model, "target", None) else "recipe.qfactory"
        said.append(
            f"not known here: whether {_named(unknown)} quantize{'s' * (len(unknown) == 1)} anything on this model;"
            f" `hqsweep run` says it before its first run, as that imports the function of {key}, and this does not"
        )
    return tuple(said)


def _arms(points: Sequence[GridPoint], configs: Sequence[Config]) -> list[Arm]:
    """Each arm of the trainings by its first run; the runs of one arm differ in seed and fork point alone."""
    arms: dict[str, Arm] = {}
    for point, config in zip(points, configs, strict=True):
        if isinstance(config, ConvergenceConfig) and not is_trunk(point) and point.arm not in arms:
            modules, own = _modules(config), None
            if modules is not None:
                own = applied(config.recipe.build(), config.own_steps, modules)
            arms[point.arm] = Arm(
                name=point.arm, point=point, config=config, settings=_settings(point.config),
                modules=modules or (), applied=own,
            )  # fmt: skip
    return list(arms.values())


def _modules(config: ConvergenceConfig) -> tuple[GemmModule, ...] | None:
    """The modules whose slots the recipe fills; None where they, or the recipe, are not known."""
    if config.recipe.has_names:
        return None
    if isinstance(config.model, ModelConfig):
        return (*config.gemm_modules(config.data.vocab_estimate), *TABLES)
    from hqsweep.models.build import gemm_modules  # not for a GPT

    modules = gemm_modules(config, config.data.vocab_estimate)
    return None if modules is None else tuple(modules)


def _settings(config: dict[str, Any]) -> str:
    """The keys in which runs differ beside the recipe. A fork counts by its noise alone, as arms share their points."""
    own = {key: value for key, value in config.items() if key not in ("recipe", "seed", *NOT_IN_ID)}
    return json.dumps(own | {"fork": (own.get("fork") or {}).get("noise")}, sort_keys=True)


def _known(arms: Sequence[Arm], baseline: str | None) -> Iterator[str]:
    groups: dict[Any, list[Arm]] = {}
    for arm in arms:
        groups.setdefault((arm.settings, arm.applied), []).append(arm)
    for group in groups.values():
        measured = [arm for arm in group if _is_baseline(arm, baseline)]
        first, *others = [*measured, *(arm for arm in group if arm not in measured)]
        vain = [arm for arm in (*others, first) if arm.is_vain]
        for arm in vain:
            beside = first if arm is not first else next(iter(others), None)
            twin = f", so its runs repeat those of {_role(beside, measured)}" if beside else ""
            why = why_nothing(arm.config.recipe.build(), arm.modules)
            yield f"arm '{arm.name}' quantizes nothing on this model{twin}: {why}. {REMEDY}{_by(arm)}."
        others = [arm for arm in others if arm not in vain]
        if others and first.applied.quantizes:
            yield (
                f"arm{'s' * (len(others) > 1)} {_named(others)} {'have' if len(others) > 1 else 'has'} the operands of"
                f" {_role(first, measured)} on this model, so all their runs are equal. Leave all but one out."
            )


def _is_baseline(arm: Arm, baseline: str | None) -> bool:
    return baseline in (arm.name, arm.point.variant, section(arm.point, "recipe").get("name"))


def _role(arm: Arm, measured: Sequence[Arm]) -> str:
    return f"{'the baseline ' * (arm in measured)}'{arm.name}'"


def _by(arm: Arm) -> str:
    """The sections of a recipe that its modules take."""
    parts = dict.fromkeys("head" if m.name == "head" else m.module_type for m in arm.modules if m not in TABLES)
    return f" (by {', '.join(f'recipe.{part}' for part in parts)})" if parts else ""


def _named(arms: Sequence[Arm]) -> str:
    names = [f"'{arm.name}'" for arm in arms[:FIRST]]
    more = len(arms) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
