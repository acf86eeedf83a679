"""What a forward pass needs beside its tensors: the key of stochastic rounding, and a probe on sampled steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from hqsweep.formats import RngKey
from hqsweep.nn.probe import Probe


@dataclass(frozen=True, kw_only=True)
class Context:
    """Captured by each module in forward, so that backward and recompute draw the same bits."""

    seed: int = 0
    step: int = 0
    probe: Probe | None = None

    def key(self, slot: str) -> RngKey:
        return RngKey(seed=self.seed, slot=slot, step=self.step)


_OUTSIDE = Context()
_CURRENT: ContextVar[Context] = ContextVar("hqsweep_quantization", default=_OUTSIDE)


def current() -> Context:
    """The innermost context; outside of any: seed 0, step 0, no probe."""
    return _CURRENT.get()


@contextmanager
def quantization(*, seed: int = 0, step: int = 0, probe: Probe | None = None) -> Iterator[None]:
    """Modules called inside draw their random bits from (seed, slot, step) and report to `probe`."""
    token = _CURRENT.set(Context(seed=seed, step=step, probe=probe))
    try:
        yield
    finally:
        _CURRENT.reset(token)
