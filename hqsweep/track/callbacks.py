"""Callbacks that log a trainer's run into hqsweep.track, and give the seed and the step to +sr and delayed scaling.

    with hqsweep.track("study", arm="nvfp4", seed=0) as run:
        transformers.Trainer(..., callbacks=[run.transformers_callback()]).train()
        lightning.Trainer(..., callbacks=[run.lightning_callback()]).fit(model)

A loop of one's own needs none: `for step in run.steps(1, 1001):`.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Protocol

from hqsweep.errors import UserError

OF_CLOCKS = ("runtime", "per_second", "total_flos", "epoch")
"""Parts of the names of what trainers log of their own time, which differs from run to run."""


class Run(Protocol):
    """What a callback needs of own_loop.TrackedRun."""

    def log(self, step: int, values: Mapping[str, Any], /) -> None: ...

    def quantization(self, step: int) -> Any: ...


class StepContext:
    """Holds quantization(seed, step) between two calls of a trainer."""

    def __init__(self, run: Run) -> None:
        self._run, self._stack = run, ExitStack()

    def begin(self, step: int) -> None:
        """Enter the step, if it is another one than before."""
        self.end()
        self._stack.enter_context(self._run.quantization(step))

    def end(self) -> None:
        self._stack.close()


def kept(logs: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of what a trainer logs, without its times."""
    return {
        name: float(value)
        for name, value in logs.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and not any(part in name for part in OF_CLOCKS)
    }


def for_transformers(run: Run) -> Any:
    """A callback for transformers.Trainer: what it logs goes to the run, and each training step has seed and step
    (state.global_step + 1, for all its microbatches). UserError without transformers."""
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise UserError("track: transformers is not installed; pip install transformers") from None
    context = StepContext(run)

    class Tracked(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            context.begin(state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            context.end()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            values = kept(logs or {})
            if values and state.is_world_process_zero:
                run.log(state.global_step, values)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            context.end()

    return Tracked()


def for_lightning(run: Run) -> Any:
    """A callback for Lightning's Trainer: its logged metrics go to the run after each training batch and validation,
    and each batch has seed and step (global_step + 1). UserError without Lightning."""
    base = _lightning_callback()
    context, logged = StepContext(run), dict[str, float]()

    class Tracked(base):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            context.begin(trainer.global_step + 1)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            context.end()
            _log_new(run, trainer, logged)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                _log_new(run, trainer, logged)

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            context.end()

    return Tracked()


def _lightning_callback() -> type:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return __import__(package, fromlist=["Callback"]).Callback
        except ImportError:
            continue
    raise UserError("track: lightning is not installed; pip install lightning")


def _log_new(run: Run, trainer: Any, logged: dict[str, float]) -> None:
    """Log the metrics that have changed since, as Lightning keeps the last value of each."""
    now = kept(
        {name: getattr(value, "item", lambda value=value: value)() for name, value in trainer.logged_metrics.items()}
    )
    new = {name: value for name, value in now.items() if logged.get(name) != value}
    logged.update(now)
    if new and trainer.is_global_zero:
        run.log(trainer.global_step, new)
