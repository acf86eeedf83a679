"""Megatron-Core's own GPT on held weights, with its distributed optimizer over gloo, and in one process."""

from contextlib import nullcontext
from unittest import mock

import torch
from support.parallel import megatron_ranks
from support.parallel.megatron_ranks import ADAM, RANKS, on_cpu
from torch import Tensor, nn

from hqsweep.compat.megatron import adapt_megatron
from hqsweep.nn import Linear, LinearOptions, quantization, quantized_model_init
from hqsweep.optim import FusedAdam, use_main_grads
from hqsweep.quant import HybridQuantizedTensor

STEPS, VOCABULARY, LENGTH, SEQUENCES, WIDTH = 20, 64, 32, 4, 64
PLAIN = "bf16"
RECIPES = (PLAIN, "nvfp4|mxfp8", "fp8_current")
RATE = 3e-3


class HeldLinear(nn.Module):
    """A linear by the arguments of Megatron-Core's column-parallel and row-parallel ones. It returns (y, no bias)."""

    recipe = "bf16"

    def __init__(self, input_size: int, output_size: int, **options: object) -> None:
        super().__init__()
        fused = LinearOptions(fuse_wgrad_accumulation=True)
        name = options.get("tp_comm_buffer_name") or "linear"
        self.linear = Linear(input_size, output_size, name=name, recipe=self.recipe, options=fused)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.linear(x), None


def build(recipe: str) -> nn.Module:
    """A GPT of two layers in bfloat16, whose linears, but the last one, hold their weights quantized."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec()
    parts = spec.submodules
    parts.self_attention.submodules.linear_qkv = parts.self_attention.submodules.linear_proj = HeldLinear
    parts.mlp.submodules.linear_fc1 = parts.mlp.submodules.linear_fc2 = HeldLinear
    held = quantized_model_init(enabled=recipe != PLAIN, preserve_high_precision_init_val=True)
    with mock.patch.object(HeldLinear, "recipe", recipe), held:
        model = GPTModel(_config(), spec, VOCABULARY, LENGTH, position_embedding_type="learned_absolute")
    model.to(torch.bfloat16)
    for index, linear in enumerate(module for module in model.modules() if isinstance(module, Linear)):
        linear.name = f"linear{index}"
    return model


def _config() -> object:
    from megatron.core.transformer import TransformerConfig

    off = dict.fromkeys(
        ("bias_dropout_fusion", "bias_activation_fusion", "masked_softmax_fusion", "add_bias_linear",
         "gradient_accumulation_fusion"), False,
    )  # fmt: skip
    sizes = {"num_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 2}
    return TransformerConfig(
        **sizes, **off, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, bf16=True,
        params_dtype=torch.bfloat16,
    )  # fmt: skip


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """The mean loss of this rank's sequences, which count up in steps of their own."""
    first = torch.arange(SEQUENCES).chunk(RANKS)[rank][:, None] + step
    tokens = (first + (first % 3 + 1) * torch.arange(LENGTH + 1)) % VOCABULARY
    places = torch.arange(LENGTH).expand(len(first), -1)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    with quantization(step=step, microbatch=rank):
        loss = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:]).mean()
        loss.backward()
    return loss.detach()


def state(model: nn.Module) -> dict[str, Tensor]:
    """Operands of held weights, and other parameters."""
    tensors = {}
    for name, parameter in model.named_parameters():
        own = {"": parameter}
        if isinstance(parameter, HybridQuantizedTensor):
            parameter.high_precision_init_val = None  # each rank drops it where it has read its fragment
            own = parameter.buffers
        tensors |= {f"{name} {key}": tensor.detach().clone() for key, tensor in own.items()}
    return tensors


def everything(rank: int) -> dict[str, object]:
    """What megatron_ranks.run() returns, and what run() does, in one launch."""
    return megatron_ranks.run(rank) | {"gpt": run(rank)}


def run(rank: int) -> tuple[dict[str, object], dict[str, object]]:
    """Losses of the steps, and the parameters after them, of each recipe: over ranks, and in the first rank alone."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    adapt_megatron()
    with on_cpu(), mock.patch.object(random.CudaRNGStatesTracker, "fork", lambda *_: nullcontext()):
        over_ranks = {recipe: trained(recipe, rank) for recipe in RECIPES}
        return over_ranks, {recipe: in_one_process(recipe) for recipe in RECIPES if rank == 0}


def trained(recipe: str, rank: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """This rank's losses, and the parameters after the steps."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    model, losses = build(recipe), []
    options = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, "overlap_grad_reduce": False}
    wrapped = DistributedDataParallel(_config(), DistributedDataParallelConfig(**options), model)
    adam = {"lr": RATE, "weight_decay": ADAM["weight_decay"], "adam_eps": ADAM["eps"], "clip_grad": 0.0}
    betas = {"adam_beta1": ADAM["betas"][0], "adam_beta2": ADAM["betas"][1]}
    config = OptimizerConfig(optimizer="adam", bf16=True, use_distributed_optimizer=True, **adam, **betas)
    optimizer = get_megatron_optimizer(config, [wrapped])
    for step in range(1, STEPS + 1):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(loss_of(wrapped, step, rank))
        wrapped.finish_grad_sync()
        optimizer.step()
    return losses, state(model)


def in_one_process(recipe: str) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """The losses of the slices by FusedAdam, with FP32 gradients that are means over these, and the parameters."""
    model, losses = build(recipe), []
    use_main_grads(model)
    optimizer = FusedAdam(model.parameters(), **ADAM | {"lr": RATE})
    for step in range(1, STEPS + 1):
        parts, of_ranks = [], []
        for rank in range(RANKS):
            optimizer.zero_grad()
            of_ranks.append(loss_of(model, step, rank))
            parts.append([p.main_grad.clone() for p in model.parameters()])
        for p, *gradients in zip(model.parameters(), *parts, strict=True):
            p.main_grad.copy_(sum(g / RANKS for g in gradients))
        optimizer.step()
        losses.append(of_ranks)
    return losses, state(model)
