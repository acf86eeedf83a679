"""How fast a training goes: the learning rate of each step, and tokens a second."""

import time
from collections.abc import Callable

from hqsweep.config.train import TrainConfig


def learning_rate(train: TrainConfig, step: int) -> float:
    """Warm-up, stable, decay (WSD): linear up over `warmup`, linear down to min_lr_fraction over the last `decay`."""
    warmup, decay = train.warmup * train.steps, train.decay * train.steps
    rise = min(1.0, step / warmup) if warmup else 1.0
    left = (train.steps - step + 1) / decay if decay else 1.0
    return train.lr * rise * (train.min_lr_fraction + (1 - train.min_lr_fraction) * min(1.0, left))


class Throughput:
    """Tokens a second since the first call, evaluations and samples included."""

    def __init__(self, tokens_per_step: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.tokens_per_step, self.clock = tokens_per_step, clock
        self.start: tuple[int, float] | None = None

    def at(self, step: int) -> float | None:
        """The speed at a step; None until a step has passed since the first call."""
        if self.start is None:
            self.start = (step, self.clock())
            return None
        steps, seconds = step - self.start[0], self.clock() - self.start[1]
        return steps * self.tokens_per_step / seconds if steps and seconds > 0 else None
