"""Parameters as an optimizer sees them: their summed gradients, and writes by others.

main_grad is an FP32 sum to which every backward adds; gradients are clipped by the norm. Under fully_shard a main_grad
is this rank's part, to which FSDP's reductions are added. DistributedDataParallel averages main_grads in place of
grads, beside backward.

Rounded notices when others write to a parameter after its master was rounded into it. A held parameter counts the
writes to its values. A plain parameter has torch's version and the address of its memory; writes to p.data and by numpy
change neither.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from hqsweep.errors import UserError
from hqsweep.nn.core.parameter import SUMS
from hqsweep.parallel.shards.fsdp_state import sum_in_fp32, unsharded_sum
from hqsweep.parallel.wire.local import is_spread, local, spread_like, total_norm
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.torch_private import foreach_copy_, foreach_mul_, fsdp_parameters, queue_callback


def gradient(p: Tensor) -> Tensor | None:
    """main_grad where there is one, else grad. UserError where there are both, since one of them would be lost."""
    main_grad = getattr(p, "main_grad", None)
    if main_grad is not None and p.grad is not None:
        raise UserError(
            f"a parameter of shape {tuple(p.shape)} has both grad and main_grad; optim.use_main_grads adds each grad to"
            " main_grad; give it the model that DistributedDataParallel or fully_shard has made"
        )
    return p.grad if main_grad is None else main_grad


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """[]: the 2-norm of all gradients together. float32 where some are DTensors, else in torch's dtype for them."""
    return total_norm(gradients) if any(map(is_spread, gradients)) else get_total_norm(gradients)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """[]: min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grads_with_norm_ computes it."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clip_(gradients: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Multiply gradients in place by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grads_with_norm_ does."""
    factor = clip_factor(norm, max_norm)
    alike: dict[tuple, list[Tensor]] = {}
    for part in map(local, gradients):
        alike.setdefault((part.device, part.dtype), []).append(part)
    for (device, _), parts in alike.items():
        foreach_mul_(parts, factor.to(device))


def use_main_grads(module: nn.Module) -> None:
    """Give every parameter an FP32 main_grad of zeros, to which each backward adds, and no grad.

    Modules with fuse_wgrad_accumulation add the FP32 result of wgrad. For other parameters autograd's grad is added to
    main_grad and dropped.

    module: over ranks, the module that DistributedDataParallel or fully_shard has made. Under fully_shard each
    main_grad is a DTensor like its parameter. The FP32 sum of the microbatches since the last reduction is reduced
    (set_requires_gradient_sync), in whatever dtype weights are gathered. FSDP returns results in the parameter's dtype,
    so parameters must be float32: UserError for others. DistributedDataParallel averages the main_grads at the end of
    each backward outside of its no_sync(), by a hook in place of a communication hook.
    """
    _refuse_rounded(module)
    for part in module.modules():
        if hasattr(part, "fuse_wgrad_accumulation"):
            part.fuse_wgrad_accumulation = True
    parameters = [p for p in module.parameters() if p.requires_grad]
    for p in parameters:
        p.main_grad = spread_like(p, torch.zeros(local(p).shape, dtype=torch.float32, device=p.device))
        p.register_post_accumulate_grad_hook(_accumulate)
    sum_in_fp32(module)
    if unsharded_sum not in SUMS:
        SUMS.append(unsharded_sum)
    if isinstance(module, DistributedDataParallel):
        module.register_comm_hook((module.process_group, parameters), _average_main_grads)


def _refuse_rounded(module: nn.Module) -> None:
    """UserError for a parameter that fully_shard has cut and whose reduced gradients are not float32."""
    for p in (parameter.sharded_param for parameter in fsdp_parameters(module)):
        if p.requires_grad and p.dtype != torch.float32:
            dtype = str(p.dtype).removeprefix("torch.")
            raise UserError(
                f"use_main_grads: fully_shard gives gradients of a parameter {list(p.shape)} in its dtype, {dtype}, and"
                " FP32 sums of them would be of rounded ones; call model.float() before fully_shard, and gather with"
                f" MixedPrecisionPolicy(param_dtype=torch.{dtype}, reduce_dtype=torch.float32)"
            )


def _accumulate(p: Tensor) -> None:
    if p.grad is not None:  # a module that adds to main_grad returns no grad
        local(p.main_grad).add_(local(p.grad))
        p.grad = None


def _average_main_grads(state: tuple[Any, list[Tensor]], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook of DistributedDataParallel, for one bucket of parameters with complete gradients.

    state: the process group, and all parameters.
    """
    group, parameters = state
    flat = [p.main_grad.view(-1) for p in bucket.parameters()]
    summed = torch.cat(flat).div_(dist.get_world_size(group))
    if bucket.is_last():
        _drop_grads_after_backward(parameters)

    def write(_: Any) -> Tensor:
        foreach_copy_(flat, summed.split([len(part) for part in flat]))
        return bucket.buffer()

    return dist.all_reduce(summed, group=group, async_op=True).get_future().then(write)


def _drop_grads_after_backward(parameters: Iterable[Tensor]) -> None:
    """Drop the grads of zeros that DistributedDataParallel gives every parameter at the end of backward.

    DistributedDataParallel does so in a callback that is queued after this one, and before the callback that this one
    queues.
    """
    queue = queue_callback

    def drop() -> None:
        for p in parameters:
            p.grad = None

    queue(lambda: queue(drop))


FAR = 0.5
"""A distance between parameter and master, over the larger norm of the two, that no rounding causes."""


class Rounded:
    """The masters that an optimizer has rounded into parameters."""

    def __init__(self) -> None:
        self._seen: dict[Tensor, tuple[ref[Tensor], tuple[int, ...]]] = {}
        """Parameter -> (the master rounded into it, the count of writes to it at that time)."""

    def note(self, p: Tensor, master: Tensor) -> None:
        """Note that the master has just been rounded into the parameter."""
        self._seen[p] = ref(master), _writes(p)

    def knows(self, p: Tensor, master: Tensor) -> bool:
        """Whether this master was rounded into the parameter, and was not loaded since."""
        return p in self._seen and self._seen[p][0]() is master

    def is_stale(self, p: Tensor, master: Tensor) -> bool:
        """Whether others have written values to the parameter since this master was rounded into it."""
        return self.knows(p, master) and self._seen[p][1] != _writes(p) and not _is_rounded(p, master)

    def check_loaded(self, masters: Mapping[Tensor, Tensor]) -> None:
        """UserError for a loaded master whose parameter, loaded too, cannot be its rounded value."""
        loaded = [(p, master) for p, master in masters.items() if not self.knows(p, master)]
        pairs = [(p, *pair) for p, master in loaded if (pair := _values(p, master))]
        if not pairs or (pairs[0][1].is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        far = [(own - values).norm() > FAR * torch.maximum(own.norm(), values.norm()) for _, own, values in pairs]
        for (p, _, _), is_far in zip(pairs, torch.stack([each.cpu() for each in far]).tolist(), strict=True):
            if is_far:
                raise UserError(
                    f"FusedAdam: the loaded state has a master of other values than a parameter {list(p.shape)} in"
                    f" {_format(p)} holds; load the model and the optimizer of one checkpoint, or build a new optimizer"
                    " for the model"
                )


def values_of(p: Tensor) -> Tensor:
    """float32: the values of this rank's part of a parameter."""
    part = local(p).detach()
    return part.dequantize(torch.float32) if isinstance(part, HybridQuantizedTensor) else part.to(torch.float32)


def _values(p: Tensor, master: Tensor) -> tuple[Tensor, Tensor] | None:
    """(master, values of its parameter). None where a rank lacks part of the values, and for delayed scaling, whose
    first scales fit no values."""
    part = local(p)
    held = isinstance(part, HybridQuantizedTensor)
    if part.is_meta or (held and (part.rowwise is None or part.shared.is_partial or part.quantizer.delayed)):
        return None
    return local(master), values_of(p)


def _format(p: Tensor) -> str:
    part = local(p)
    return str(part.quantizer if isinstance(part, HybridQuantizedTensor) else part.dtype)


def _writes(p: Tensor) -> tuple[int, ...]:
    part = local(p)
    if isinstance(part, HybridQuantizedTensor):
        return tuple(part.shared.writes)
    return p._version, part._version, part.data_ptr()


def _is_rounded(p: Tensor, master: Tensor) -> bool:
    """Whether the parameter is the rounded master, to the bit. False for shards and delayed scaling, whose rounding
    depends on more than the values."""
    part, own = local(p), local(master)
    if not isinstance(part, HybridQuantizedTensor):
        return torch.equal(own.to(part.dtype), part)
    meta = part.metadata
    if meta.place is not None or part.part is not None or part.states is not None or meta.shares_scale:
        return False
    again = torch.empty_like(part).quantize_(own, key=meta.key)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in part.copies(again))
