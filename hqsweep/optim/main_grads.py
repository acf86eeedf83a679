"""main_grad: an FP32 sum of a parameter's gradients, to which every backward adds, also where ranks share the work.

Under fully_shard a main_grad is this rank's part, to which FSDP's reductions are added; under DistributedDataParallel
the main_grads are what ranks average, in place of the grads, while backward goes on.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from hqsweep.errors import UserError
from hqsweep.nn.core.parameter import SUMS
from hqsweep.parallel.fsdp.fsdp_state import parameters_of, sum_in_fp32, unsharded_sum
from hqsweep.parallel.wire.local import local, spread_like


def use_main_grads(module: nn.Module) -> None:
    """Give every parameter an FP32 main_grad of zeros, to which each backward adds, and no grad.

    Modules with fuse_wgrad_accumulation add the FP32 result of wgrad; for other parameters autograd's grad is added
    and dropped.

    module: where there are ranks, what DistributedDataParallel or fully_shard has made. Under fully_shard each
    main_grad is a DTensor as its parameter is, and what is reduced is the FP32 sum of the microbatches since the last
    reduction (set_requires_gradient_sync), whatever the dtype in which weights are gathered. FSDP gives the result in
    the parameter's own dtype, so parameters are float32 there: UserError for others, whose sums would be of rounded
    results. DistributedDataParallel averages the main_grads at the end of each backward but those in its no_sync(), by
    a hook that takes the place of a communication hook.
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
    """UserError for a parameter that fully_shard has cut, and whose reduced gradients are not float32."""
    for p in (parameter.sharded_param for parameter in parameters_of(module)):
        if p.requires_grad and p.dtype != torch.float32:
            dtype = str(p.dtype).removeprefix("torch.")
            raise UserError(
                f"use_main_grads: fully_shard gives gradients of a parameter {list(p.shape)} in its dtype, {dtype}, and"
                " FP32 sums of them would be of rounded ones; call model.float() before fully_shard, and gather with"
                f" MixedPrecisionPolicy(param_dtype=torch.{dtype}, reduce_dtype=torch.float32)"
            )


def _accumulate(p: Tensor) -> None:
    if p.grad is not None:  # a module that adds to main_grad gives autograd none
        local(p.main_grad).add_(local(p.grad))
        p.grad = None


def _average_main_grads(state: tuple[Any, list[Tensor]], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook of DistributedDataParallel, for one bucket of parameters whose gradients are complete.
    state: the process group, and all parameters."""
    group, parameters = state
    flat = [p.main_grad.view(-1) for p in bucket.parameters()]
    summed = torch.cat(flat).div_(dist.get_world_size(group))
    if bucket.is_last():
        _drop_grads_after_backward(parameters)

    def write(_: Any) -> Tensor:
        torch._foreach_copy_(flat, summed.split([len(part) for part in flat]))
        return bucket.buffer()

    return dist.all_reduce(summed, group=group, async_op=True).get_future().then(write)


def _drop_grads_after_backward(parameters: Iterable[Tensor]) -> None:
    """DistributedDataParallel gives every parameter a grad of zeros, by a callback that is queued after this one and
    runs before the callback that this one queues."""
    queue = Variable._execution_engine.queue_callback

    def drop() -> None:
        for p in parameters:
            p.grad = None

    queue(lambda: queue(drop))
