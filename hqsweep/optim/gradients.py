"""The gradient of an update: a parameter's grad, or its FP32 main_grad; the norm of all, and clipping."""

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.nn.utils import get_total_norm

from hqsweep.errors import UserError
from hqsweep.parallel.wire.local import is_spread, local, total_norm
from hqsweep.torch_private import foreach_mul_


def gradient(p: Tensor) -> Tensor | None:
    """main_grad where there is one, else grad; UserError where there are both, since one of them would be lost."""
    main_grad = getattr(p, "main_grad", None)
    if main_grad is not None and p.grad is not None:
        raise UserError(
            f"a parameter of shape {tuple(p.shape)} has both grad and main_grad; optim.use_main_grads adds each grad to"
            " main_grad; give it the model that DistributedDataParallel or fully_shard has made"
        )
    return p.grad if main_grad is None else main_grad


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """[]: the 2-norm of all gradients together, as torch has it, in their dtype; float32 over ranks where some are
    spread."""
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
