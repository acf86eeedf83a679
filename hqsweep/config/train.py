"""The sections `train` and `stats` of the config: how a model is trained, and what is measured on the way."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hqsweep.config.parallel import ONE_RANK, ParallelConfig
from hqsweep.config.types import Count, Device, Fraction, Index, Positive, Section
from hqsweep.errors import UserError

Compile = Literal["auto", "graph", "off"]
"""How a step runs on a GPU: on hqsweep's kernels, and as a CUDA graph where it can be captured; as a graph or not at
all; on torch's operators without a graph."""

Recompute = Literal["none", "layer", "attention"]
"""What backward computes again instead of keeping it: nothing, every layer, or the core of attention."""


class TrainConfig(Section):
    """AdamW with warmup, a constant stretch and a linear decay; warmup and decay are fractions of the steps.

    recompute: what backward computes again instead of keeping it; offload: the rest waits in CPU memory. A step runs
    its batch in `microbatches` equal parts, whose gradients add up. compile: auto and graph give the same bits; off is
    the reference, whose sums on a GPU are in another order. The CPU knows one way, and refuses graph. Over several
    ranks `batch` is still that of all of them, and each runs its part of it in `microbatches`.
    """

    steps: Count = 200
    batch: Count = 16
    microbatches: Count = 1
    context: Count = 128
    lr: Annotated[float, Field(gt=0, le=1e30)] = 1e-3
    min_lr_fraction: Fraction = 0.1
    warmup: Fraction = 0.05
    decay: Fraction = 0.4
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    clip: Positive = 1.0
    dtype: Literal["bf16", "fp32"] = "bf16"
    device: Device = "auto"
    recompute: Recompute = "none"
    offload: bool = False
    compile: Compile = "auto"
    log_every: Count = 10
    eval_every: Count = 100
    eval_batches: Count = 8
    checkpoint_every: Count = 100
    parallel: ParallelConfig = ONE_RANK

    @model_validator(mode="after")
    def _schedule(self) -> "TrainConfig":
        if self.warmup + self.decay > 1:
            raise UserError(
                f"train.warmup: {self.warmup} and train.decay {self.decay} are fractions of the steps and sum to more"
                " than 1; lower one of them"
            )
        if self.batch % self.microbatches:
            raise UserError(f"train.microbatches: {self.batch} sequences do not divide into {self.microbatches} parts")
        self.parallel.check_batch(self.batch, self.microbatches)
        self.parallel.check_stages(self.microbatches)
        self.check_compile(on_gpu=self.device != "cpu")
        return self

    def check_compile(self, *, on_gpu: bool) -> None:
        """UserError for a step that has to be a CUDA graph and cannot be one."""
        if self.compile == "graph" and not on_gpu:
            raise UserError(
                "train.compile: graph is a CUDA graph, and this training is on the CPU; give auto, which is a graph"
                " where there can be one"
            )
        if self.compile == "graph" and self.offload:
            raise UserError(
                "train.compile: graph does not go with train.offload, whose copies are on streams of their own; give"
                " one of train.compile=auto and train.offload=false"
            )


class StatsConfig(Section):
    """Error statistics of all microbatches: every so many steps, 0 for never; `gemm` adds the error of each GEMM's
    output. At the step capture_at the operands of all linears in the first microbatch are written to captured/ in the
    run's folder, for `hqsweep probe`."""

    every: Index = 100
    gemm: bool = True
    capture_at: Count | None = None
