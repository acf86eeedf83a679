"""What a forward pass needs beside its tensors: the key of stochastic rounding, a probe on sampled steps, a recipe."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from hqsweep.errors import UserError
from hqsweep.formats import RngKey
from hqsweep.nn.probe import Probe
from hqsweep.quant import LinearQuantizers, Recipe
from hqsweep.quant.schedule import AnyRecipe


@dataclass(frozen=True, kw_only=True)
class Context:
    """Captured by each module in forward, so that backward and recompute draw the same bits."""

    seed: int = 0
    step: int | None = None
    """Of the training; None outside of any."""
    probe: Probe | None = None
    cache_weights: bool = False
    """Whether linears keep the operands of their weights for later calls."""

    def key(self, slot: str) -> RngKey:
        return RngKey(seed=self.seed, slot=slot, step=self.step or 0)


HIGH_PRECISION = Recipe(linear=LinearQuantizers.parse("bf16", "recipe.linear"))
_OUTSIDE = Context()
_CURRENT: ContextVar[Context] = ContextVar("hqsweep_quantization", default=_OUTSIDE)


def current() -> Context:
    """The innermost context; outside of any: seed 0, random bits of step 0, no probe."""
    return _CURRENT.get()


@contextmanager
def quantization(
    *, seed: int = 0, step: int = 0, probe: Probe | None = None, cache_weights: bool = False
) -> Iterator[None]:
    """Modules called inside draw their random bits from (seed, slot, step) and report to `probe`. All that is trained
    inside, microbatches included, is one step for delayed scaling.

    cache_weights: quantize a weight once for as long as nobody writes to it, for microbatches and evaluation; it costs
    2 bytes an element and direction.
    """
    token = _CURRENT.set(Context(seed=seed, step=step, probe=probe, cache_weights=cache_weights))
    try:
        yield
    finally:
        _CURRENT.reset(token)


_RECIPE: ContextVar[AnyRecipe | None] = ContextVar("hqsweep_autocast", default=None)


def autocast_recipe() -> AnyRecipe | None:
    """The recipe of the innermost autocast; None outside of any."""
    return _RECIPE.get()


@contextmanager
def autocast(enabled: bool = True, *, recipe: AnyRecipe | None = None) -> Iterator[None]:
    """Modules called inside run on `recipe` instead of their own; the innermost autocast decides.

    enabled=False is high precision (bf16 operands). Backward needs no autocast; recomputation in backward does.
    """
    if enabled and recipe is None:
        raise UserError("autocast: recipe is missing; give a Recipe or a CustomRecipe, or enabled=False")
    token = _RECIPE.set(recipe if enabled else HIGH_PRECISION)
    try:
        yield
    finally:
        _RECIPE.reset(token)
