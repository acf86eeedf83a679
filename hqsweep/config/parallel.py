"""The section `train.parallel` of the config: how many ranks a training runs on, and what each of them does."""

from typing import Annotated

from pydantic import Field

from hqsweep.config.model import ModelConfig, expert_width, ffn_width
from hqsweep.config.types import Count, Section
from hqsweep.errors import UserError


class ParallelConfig(Section):
    """Ranks along each axis of the mesh, by the names of torchtitan.

    dp_replicate: copies of the model, each on other sequences. dp_shard: ranks that share out one copy's parameters,
    gradients and moments, each on other sequences, too. tp: ranks that share out each matrix, and the sequence between
    matrices. pp: ranks that share out the layers, each in stages_per_rank stages. ep: of the dp_shard ranks, how many
    share out the experts of a layer, so it is no axis of its own. expert_room: each rank's experts have room for so
    many times the rows that come when all experts are chosen equally often; rows beyond it end the run, and ep times as
    many never are. null: the host waits in each layer for the number of rows, so that steps are no CUDA graphs, and as
    many have room.
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
        """How many ranks there are."""
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
        """UserError where there are other than `world` ranks. where: what gives so many, for the sentence."""
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
        """(what it is called, how many there are, the axis that shares it out)."""
        widths = [("the model's heads", model.heads, "tp"), ("model.dim", model.dim, "tp")]
        if not model.experts or model.first_moe_layer:
            widths.append(("the MLP's width", ffn_width(model), "tp"))
        if model.experts:
            widths += [("an expert's width", expert_width(model), "tp"), ("model.experts", model.experts, "ep")]
        return widths


def sharing_gpus(ranks: int, gpus: int) -> int:
    """The most of a machine's GPUs, of which there are fewer than ranks, that its ranks share out evenly."""
    return max(count for count in range(1, gpus + 1) if ranks % count == 0)


ONE_RANK = ParallelConfig()
"""A training in one process."""
