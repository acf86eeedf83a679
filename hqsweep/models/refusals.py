"""What convert() refuses as a whole: models where a swap would be without effect, or wrong, and nobody would notice."""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hqsweep.errors import UserError
from hqsweep.models.names import clean_name

ORDER = "convert first, then torch.compile for each block, then fully_shard or FSDP"


def check_model(model: nn.Module) -> None:
    """UserError for what is no model, for one that is sharded, and for one that somebody else has quantized."""
    if not isinstance(model, nn.Module):
        raise UserError(f"convert: the model is a {type(model).__name__}; it takes an nn.Module")
    fault = next(_faults(model), None)
    if fault:
        raise UserError(f"convert: {fault}")


def _faults(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        at = clean_name(name) or type(model).__name__
        if getattr(module, "is_quantized", False) is True or getattr(module, "hf_quantizer", None) is not None:
            yield f"{at} is quantized by another library ({_quantizer(module)}); load it without quantization_config"
        if is_sharded(module):
            yield f"{at} is sharded by FSDP, whose forward takes other parameters; {ORDER}"
        for parameter_name, parameter in module.named_parameters(recurse=False):
            whose = f"{at}.{parameter_name}"
            if hasattr(parameter, "ds_id"):
                yield f"{whose} is sharded by DeepSpeed's ZeRO-3, which is not supported; use stage 2, DDP or FSDP"
            if is_distributed(parameter):
                yield f"{whose} is a DTensor; tensor parallelism is not supported, and for FSDP {ORDER}"


def _quantizer(module: nn.Module) -> str:
    method = getattr(getattr(module, "config", None), "quantization_config", None)
    return str(getattr(method, "quant_method", None) or type(getattr(module, "hf_quantizer", module)).__name__)


def is_sharded(module: nn.Module) -> bool:
    """Asked without importing torch.distributed.fsdp, which who shards a model has imported."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def is_distributed(parameter: Tensor) -> bool:
    """Whether it is a DTensor."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(parameter, tensor.DTensor)


def instance_fault(module: nn.Module) -> str | None:
    """Why the class of a module cannot be swapped: a `forward` of the instance would hide that of the class."""
    if "forward" in module.__dict__ and "_old_forward" not in module.__dict__:
        return "its forward was replaced in the instance, which would pass by the recipe"
    return None


def bypassed(model: nn.Module) -> dict[nn.Module, str]:
    """Modules whose weights another module reads in evaluation without calling them, and what to do."""
    if not torch.backends.mha.get_fastpath_enabled():
        return {}
    why = (
        "nn.TransformerEncoderLayer reads its weight in evaluation and does not call it; with"
        " torch.backends.mha.set_fastpath_enabled(False) before, it is taken"
    )
    layers = [module for module in model.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    return {linear: why for layer in layers for linear in (layer.linear1, layer.linear2)}
