"""Megatron-Core's distributed optimizer over gloo, on weights that are held quantized, and one process."""

from contextlib import ExitStack, nullcontext
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hqsweep.compat.megatron import adapt_megatron
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, LinearOptions, quantization, quantized_model_init
from hqsweep.optim import FusedAdam, use_main_grads

RANKS, STEPS, ROWS = 2, 3, 64
RECIPES = ("nvfp4|mxfp8", "fp8_block", "fp8_current", "mxfp8|nvfp4@rowwise_dequantized")
BY_CODES = RECIPES[2:]
"""Those whose columnwise operand follows from codes of a byte, which Megatron-Core gathers."""
SHAPES = ((160, 64), (64, 48))
"""K and N of the linears; a rank's fragment begins within a row."""
ADAM = {"lr": 3e-2, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}


class CudaIsCpu(TorchFunctionMode):
    """Megatron-Core names CUDA where it makes tensors and asks for their types; here these are the CPU's."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            kind = {torch.bfloat16: "BFloat16Tensor", torch.float32: "FloatTensor"}[args[0].dtype]
            return f"torch.cuda.{kind}"
        return function(*args, **kwargs)


def on_cpu() -> ExitStack:
    """In which Megatron-Core runs on the CPU, over gloo, which has no coalescing of collectives."""
    from megatron.core.distributed import param_and_grad_buffer

    stack = ExitStack()
    stack.enter_context(CudaIsCpu())
    stack.enter_context(mock.patch("torch.cuda.current_device", lambda: "cpu"))
    stack.enter_context(mock.patch.object(param_and_grad_buffer, "_coalescing_manager", lambda *_, **__: nullcontext()))
    return stack


def build(recipe: str) -> nn.Sequential:
    torch.manual_seed(0)
    with quantized_model_init(preserve_high_precision_init_val=True):
        layers = [
            Linear(k, n, name=f"l{n}", recipe=recipe, bias=True, options=LinearOptions(fuse_wgrad_accumulation=True))
            for k, n in SHAPES
        ]
    return nn.Sequential(*layers).to(torch.bfloat16)


def backward(model, step: int, rank: int) -> None:
    x, dy = draw("normal", ROWS, SHAPES[0][0], step), draw("normal", ROWS, SHAPES[-1][1], -step)
    with quantization(step=step, microbatch=rank):
        model(x.chunk(RANKS)[rank]).backward(dy.chunk(RANKS)[rank])


def state(model: nn.Sequential) -> dict[str, Tensor]:
    """Operands of the weights, and biases."""
    tensors = {}
    for index, linear in enumerate(model):
        tensors |= {f"{index} {name}": buffer.clone() for name, buffer in linear.weight.buffers.items()}
        tensors[f"{index} bias"] = linear.bias.detach().clone()
    return tensors


def run(rank: int) -> dict[str, object]:
    """States after each step, of each recipe."""
    return {recipe: trained(recipe, rank) for recipe in RECIPES} | {"refused": refused()}


def refused() -> str:
    """What is said of a buffer whose bytes Megatron-Core would write into weights as values."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
    options = {"use_distributed_optimizer": True, "fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}
    with on_cpu():
        try:
            DistributedDataParallel(config, DistributedDataParallelConfig(**options), build("mxfp8"))
        except UserError as error:
            return str(error)
    return ""


def trained(recipe: str, rank: int) -> list[dict[str, Tensor]]:
    """States of the weights after each step, and with them whether their codes lie in Megatron-Core's buffer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    adapt_megatron()
    states = []
    with on_cpu():
        model = build(recipe)
        config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1)
        options = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, "overlap_grad_reduce": False}
        wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(**options), model)
        adam = {"lr": ADAM["lr"], "weight_decay": ADAM["weight_decay"], "adam_eps": ADAM["eps"], "clip_grad": 0.0}
        betas = {"adam_beta1": ADAM["betas"][0], "adam_beta2": ADAM["betas"][1]}
        optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", bf16=True, use_distributed_optimizer=True, **adam, **betas), [wrapped]
        )
        for step in range(1, STEPS + 1):
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            backward(wrapped, step, rank)
            wrapped.finish_grad_sync()
            optimizer.step()
            states.append(state(model) | {"in buffer": in_buffer(model, wrapped.buffers)})
    return states


def in_buffer(model: nn.Sequential, buffers) -> list[bool]:
    """Whether the rowwise codes of each weight lie in one of these buffers."""
    memory = {buffer.param_data.untyped_storage().data_ptr() for buffer in buffers}
    return [linear.weight.rowwise.buffers["q"].untyped_storage().data_ptr() in memory for linear in model]


def in_one_process(recipe: str) -> list[dict[str, Tensor]]:
    """FusedAdam, with FP32 gradients that are means over the slices."""
    model = build(recipe)
    use_main_grads(model)
    optimizer = FusedAdam(model.parameters(), **ADAM)
    states = []
    for step in range(1, STEPS + 1):
        parts = []
        for rank in range(RANKS):
            optimizer.zero_grad()
            backward(model, step, rank)
            parts.append([p.main_grad.clone() for p in model.parameters()])
        for p, *gradients in zip(model.parameters(), *parts, strict=True):
            p.main_grad.copy_(sum(g / RANKS for g in gradients))
        optimizer.step()
        states.append(state(model))
    return states
