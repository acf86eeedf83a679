"""The sections `train`, `stats` and `data` of the config: how a model is trained, on which ranks and tokens."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from hqsweep.config.model import TARGET, Called, ModelConfig, expert_width, ffn_width
from hqsweep.config.optimizer import WHERE, Optimizer, OptimizerConfig
from hqsweep.config.safe import loads
from hqsweep.config.section import Count, Device, Fraction, Index, Positive, Section
from hqsweep.errors import UserError
from hqsweep.formats.spec import fields_of

TOKENS_VOCAB = 50304
"""The vocabulary that is assumed for token shards until they are read: GPT-2's, rounded up to a multiple of 64."""
LEARNT_NATS = 0.1
"""A loss this far, in nats, below the unigram entropy of the data shows that a model has learnt from context."""


class MarkovConfig(Section):
    """The synthetic source; concentration is the parameter of the Dirichlet rows, length is in tokens."""

    vocab: Annotated[int, Field(ge=2, le=65536)] = 16
    order: Count = 2
    concentration: Positive = 0.4
    seed: Index = 0
    length: Count = 1_000_000


class DataConfig(Section):
    """The source of the tokens; `path` is read by text, tokens and shards, `markov` by markov.

    hash: the hash of what the source leads to (train.data.Dataset.hash), which makes it a part of the run's id; the
    sweep's command fills it in, and refuses other data where it is given.
    """

    source: Literal["stdlib", "site", "text", "tokens", "shards", "markov"] = "stdlib"
    path: str | None = None
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    max_bytes: Count | None = None
    markov: MarkovConfig = MarkovConfig()
    hash: str | None = None

    @model_validator(mode="after")
    def _path(self, info: ValidationInfo) -> "DataConfig":
        if self.source in ("text", "tokens", "shards"):
            if self.path is None:
                raise UserError(f"data.path: missing; data.source={self.source} needs data.path=FILE_OR_FOLDER")
            if not Path(self.path).exists() and not (info.context or {}).get("recorded"):
                raise UserError(f"data.path: '{self.path}' does not exist; it must be a file or a folder")
        elif self.path is not None and self.source != "factory":
            raise UserError(f"data.path: data.source={self.source} reads no path; add data=text, tokens or shards")
        return self

    @property
    def vocab_estimate(self) -> int:
        """The vocabulary size before the data is read: exact for bytes, markov, and shards that state it."""
        if self.source == "shards":
            path = Path(self.path)
            return _stated_vocab(path if path.is_dir() else path.parent) or TOKENS_VOCAB
        return {"markov": self.markov.vocab, "tokens": TOKENS_VOCAB}.get(self.source, 256)


FACTORY = "factory"


class FactoryDataConfig(Called, DataConfig):
    """Samples of any kind, from the function `target` ("package.module.function", also given as data._target_), called
    with `args`, which are all other keys; train.batches says what it returns.

    The other keys of DataConfig are not read. Only commands that may import the function know its data.
    """

    WHERE, LIKE, GIVEN = f"data.{TARGET}", "my_data.build", {"source": FACTORY}
    source: Literal["factory"]

    @property
    def vocab_estimate(self) -> int:
        """0: there are no tokens."""
        return 0


def data_kind(section: Any) -> str:
    """The kind of a section `data`: "factory" for a Python function's samples, else "tokens"."""
    if isinstance(section, Mapping):
        return FACTORY if TARGET in section or section.get("source") == FACTORY else "tokens"
    return FACTORY if isinstance(section, FactoryDataConfig) else "tokens"


Data = Annotated[
    Annotated[DataConfig, Tag("tokens")] | Annotated[FactoryDataConfig, Tag(FACTORY)], Discriminator(data_kind)
]
"""The section: tokens of a source, or samples of a Python function."""


def _stated_vocab(folder: Path) -> int | None:
    """The size that a readable manifest.json or meta.json states; None without one. Other readers report its faults."""
    for path in (folder / "manifest.json", folder / "meta.json"):
        if path.is_file() and (vocab := _vocab_of(path, path.stat().st_mtime_ns)):
            return vocab
    return None


@lru_cache
def _vocab_of(path: Path, written_ns: int) -> int | None:
    """The vocab_size of a JSON file as it was last written; every run of a grid asks for it."""
    try:
        return int(loads(path.read_bytes())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class ParallelConfig(Section):
    """Ranks along each axis of the mesh, by the names of torchtitan.

    dp_replicate: copies of the model, each on other sequences.
    dp_shard: ranks that share out one copy's parameters, gradients and moments, each on other sequences, too.
    tp: ranks that share out each matrix, and the sequence between matrices.
    pp: ranks that share out the layers, each in stages_per_rank stages.
    ep: the number of dp_shard ranks that share out the experts of a layer, so it is no axis of its own.
    expert_room: the room of each rank's experts, in units of the rows under equal choices. Rows beyond it end the run;
    ep has room for any choices. null: the host waits in each layer for the number of rows and makes room for them, so
    that steps are no CUDA graphs.
    """

    dp_replicate: Count = 1
    dp_shard: Count = 1
    tp: Count = 1
    ep: Count = 1
    pp: Count = 1
    stages_per_rank: Count = 1
    expert_room: Annotated[float, Field(ge=1, le=1e6)] | None = None

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def data(self) -> int:
        """Parts that a step's batch is shared out in."""
        return self.dp_replicate * self.dp_shard

    @property
    def formula(self) -> str:
        """The number of ranks as the product of the axes, for sentences."""
        axes = ("pp", "dp_replicate", "dp_shard", "tp")
        return " * ".join(f"{name}={getattr(self, name)}" for name in axes)

    def check_world(self, world: int, where: str) -> None:
        """Raise UserError unless there are `world` ranks. where: the source of that number, for the sentence."""
        if world != self.world:
            raise UserError(
                f"train.parallel: {where} gives {world} ranks, but {self.formula} is {self.world}; change one of them"
            )

    def check_batch(self, batch: int, microbatches: int) -> None:
        """UserError where the sequences of a step do not divide into the ranks' microbatches."""
        if batch % (self.data * microbatches):
            raise UserError(
                f"train.batch: {batch} sequences do not divide into {self.data} ranks (train.parallel.dp_replicate *"
                f" dp_shard) of {microbatches} microbatches; give a multiple of {self.data * microbatches}"
            )

    def check_stages(self, microbatches: int) -> None:
        """UserError where microbatches do not keep the stages of a pipeline at work."""
        if self.pp == 1 and self.stages_per_rank > 1:
            raise UserError(
                f"train.parallel.stages_per_rank: {self.stages_per_rank} stages of each rank of pp, but pp is 1; give"
                " pp, or leave it out"
            )
        if self.stages_per_rank > 1 and microbatches % self.pp:
            raise UserError(
                f"train.microbatches: {microbatches} do not divide into rounds of train.parallel.pp={self.pp}, which"
                f" stages_per_rank={self.stages_per_rank} takes; give a multiple of {self.pp}"
            )
        if microbatches < self.pp:
            raise UserError(
                f"train.microbatches: {microbatches} for the stages of train.parallel.pp={self.pp}, which work on a"
                f" microbatch each; give {self.pp} or more"
            )

    def check_model(self, model: ModelConfig) -> None:
        """UserError where heads, widths, experts or layers of the GPT do not divide by their axis."""
        for name, count, axis in self._divided(model):
            if count % getattr(self, axis):
                raise UserError(
                    f"train.parallel.{axis}: {getattr(self, axis)} does not divide {name} ({count}); give a divisor of"
                    " it, or another model"
                )
        if self.dp_shard % self.ep:
            raise UserError(
                f"train.parallel.ep: {self.ep} does not divide dp_shard ({self.dp_shard}), whose ranks share out the"
                " experts; raise dp_shard or lower ep"
            )
        if self.ep > 1 and not model.experts:
            raise UserError(f"train.parallel.ep: {self.ep}, but model.experts is 0; give experts, or ep=1")
        if self.ep == 1 and self.expert_room is not None:
            raise UserError(
                f"train.parallel.expert_room: {self.expert_room} for experts that ranks share out, but ep is 1; give"
                " ep, or leave it out"
            )
        self._check_experts(model)
        stages = self.pp * self.stages_per_rank
        if self.pp > 1 and stages > model.layers:
            more = f" * stages_per_rank={self.stages_per_rank}" if self.stages_per_rank > 1 else ""
            raise UserError(
                f"train.parallel: pp={self.pp}{more} is {stages} stages of {model.layers} model.layers; lower one of"
                " them"
            )

    def _check_experts(self, model: ModelConfig) -> None:
        """UserError where ranks of dp_shard can share out neither whole experts nor parts of each. Of experts that are
        held quantized a rank may also have none."""
        if max(self.ep, self.tp) == 1 or model.experts % self.dp_shard == 0 or model.quantized_weights:
            return
        sharers = self.dp_shard // self.ep
        if model.dim % sharers:
            raise UserError(
                f"train.parallel.dp_shard: {self.dp_shard} does not divide model.experts ({model.experts}), and the"
                f" {sharers} ranks of the same experts do not divide model.dim ({model.dim}); give a divisor, or"
                " dp_replicate for the rest"
            )

    @staticmethod
    def _divided(model: ModelConfig) -> list[tuple[str, int, str]]:
        """Return (name, number, axis) of everything that ranks share out."""
        widths = [("the model's heads", model.heads, "tp"), ("model.dim", model.dim, "tp")]
        if not model.experts or model.first_moe_layer:
            widths.append(("the MLP's width", ffn_width(model), "tp"))
        if model.experts:
            widths += [("an expert's width", expert_width(model), "tp"), ("model.experts", model.experts, "ep")]
        return widths


def sharing_gpus(ranks: int, gpus: int) -> int:
    """The largest number of a machine's GPUs that its ranks share evenly, where there are fewer GPUs than ranks."""
    return max(count for count in range(1, gpus + 1) if ranks % count == 0)


ONE_RANK = ParallelConfig()
"""A training in one process."""


Compile = Literal["auto", "graph", "off"]
"""The way of a step on a GPU. auto: on hqsweep's kernels, as a CUDA graph where one can be captured. graph: as a CUDA
graph, or an error. off: on torch's operators without a graph."""

Recompute = Literal["none", "layer", "attention"]
"""The part that backward computes again instead of keeping it: nothing, every layer, or the core of attention."""


class TrainConfig(Section):
    """Warmup, a constant stretch and a linear decay of the rate; warmup and decay are fractions of the steps.

    optimizer: adamw; sgd with `momentum`; muon with it for the matrices of layers, and AdamW for the rest; or a class
    (OptimizerConfig), which does not read beta1 and beta2. moments: bf16 and fp8 (E4M3 in blocks of 128) round the
    moments of a named optimizer after each step. Other optimizers and moments than the first take one rank.
    recompute: the part that backward computes again instead of keeping it. offload: the rest waits in CPU memory. A
    step runs its batch in `microbatches` equal parts, whose gradients add up. compile: auto and graph give the same
    bits; off is the reference, whose sums on a GPU are in another order. With auto and graph TorchInductor compiles the
    blocks of a user's own model. The CPU knows one way, and refuses graph. Over several ranks `batch` is the sum of all
    ranks' batches, and each rank runs its part in `microbatches`.
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
    optimizer: Optimizer = "adamw"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    moments: Literal["fp32", "bf16", "fp8"] = "fp32"
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
        if self.parallel.world > 1 and (self.optimizer, self.moments) != ("adamw", "fp32"):
            raise UserError(
                f"train.optimizer: {self.optimizer} with moments {self.moments} takes whole parameters, but"
                f" train.parallel has {self.parallel.world} ranks; give adamw and fp32, or one rank"
            )
        if isinstance(self.optimizer, OptimizerConfig) and self.moments != "fp32":
            raise UserError(
                f"train.moments: {self.moments} rounds the moments of adamw, sgd and muon, and train.optimizer is"
                f" {self.optimizer.target}; give fp32"
            )
        self.check_compile(on_gpu=self.device != "cpu")
        return self

    def check_compile(self, *, on_gpu: bool) -> None:
        """UserError for a step that has to be a CUDA graph and cannot be one."""
        if self.compile == "graph" and not on_gpu:
            raise UserError(
                "train.compile: graph is a CUDA graph, and this training is on the CPU; give auto, which is a graph"
                " where there can be one"
            )
        if self.compile == "graph" and isinstance(self.optimizer, OptimizerConfig):
            raise UserError(
                f"train.compile: graph holds no step of a class ({WHERE}), which may do something else in each; give"
                " auto"
            )
        if self.compile == "graph" and self.offload:
            raise UserError(
                "train.compile: graph does not go with train.offload, whose copies are on streams of their own; give"
                " one of train.compile=auto and train.offload=false"
            )


class StatsConfig(Section):
    """Error statistics of all microbatches, every `every` steps; 0 for never. `gemm` adds errors of GEMM outputs.

    At the step capture_at, the operands of all linears in the first microbatch are written to captured/ in the run's
    folder, for `hqsweep probe`. what_if: formats, such as [mxfp8, nvfp4]. Each sampled step also measures the errors
    that they would make on its tensors, into the table what_if.
    """

    every: Index = 100
    gemm: bool = True
    capture_at: Count | None = None
    what_if: list[str] = Field(default_factory=list)

    @field_validator("what_if", mode="before")
    @classmethod
    def _one_or_many(cls, formats: Any) -> Any:
        return [formats] if isinstance(formats, str) else formats

    @field_validator("what_if")
    @classmethod
    def _known(cls, formats: list[str]) -> list[str]:
        for text in formats:
            name, _ = fields_of(text)
            if name == "fp8_delayed":
                raise UserError("stats.what_if: fp8_delayed has no error of its own; give fp8_current")
        if len(set(formats)) < len(formats):
            raise UserError(f"stats.what_if: {', '.join(formats)} has a format twice; give each once")
        return formats

    @model_validator(mode="after")
    def _sampled(self) -> Self:
        if self.what_if and not self.every:
            raise UserError("stats.what_if: no step is sampled, as stats.every is 0; give stats.every=100")
        return self
