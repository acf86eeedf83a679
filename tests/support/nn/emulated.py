"""The CUDA kernels of activations and norms by torch's operators, so that what is built around them runs on a CPU."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hqsweep.formats.hadamard import hadamard
from hqsweep.nn.layernorm_linears import ACTIVATIONS
from hqsweep.nn.norm_embedding import EPSILON
from hqsweep.ops.quantize import operators
from hqsweep.ops.quantize.kernels import NO_KEY


def activation(
    z: Tensor, kind: str, amax: bool = False, signs: bool | None = None, end: Tensor | None = None
) -> list[Tensor]:
    assert end is None
    return _with_amaxes(ACTIVATIONS[kind](z.float()).bfloat16(), amax, signs)


def activation_into(out: Tensor, z: Tensor, kind: str) -> None:
    out.copy_(activation(z, kind)[0])


def activation_backward(
    dh: Tensor, z: Tensor, kind: str, amax: bool = False, signs: bool | None = None, end: Tensor | None = None
) -> list[Tensor]:
    assert end is None
    assert dh.is_contiguous()
    assert dh.dtype == torch.bfloat16
    with torch.enable_grad():
        leaf = z.detach().float().requires_grad_()
        ACTIVATIONS[kind](leaf).backward(dh.float())
    return _with_amaxes(leaf.grad.bfloat16(), amax, signs)


def _with_amaxes(x: Tensor, amax: bool, signs: bool | None) -> list[Tensor]:
    matrices = [x] if amax else []
    if signs is not None:
        assert amax
        matrices.append(hadamard(x.t().contiguous(), signed=signs).bfloat16())
    return [x, *(matrix.float().abs().amax().view(1, 1) for matrix in matrices)]


def quantize_activated(request, z: Tensor, dh: Tensor | None, kind: str) -> list[Tensor]:
    (x,) = activation(z, kind) if dh is None else activation_backward(dh, z, kind)
    options = (request.row_text, request.column_text, request.dequantized, request.row_exact, request.column_exact)
    return operators.quantize(x, *options, NO_KEY, NO_KEY, None, None, False)


def norm(x, branch, gain, bias, epsilon, dtype, amax=False, signs=None, received=None, rank=0) -> list[Tensor]:
    """hqsweep::norm without statistics, but with as many of them."""
    branch = _sum(branch, received, rank)
    total = x if branch is None else x + branch.to(x.dtype)
    statistics = torch.zeros(1 if bias is None else 2, 1)
    h, *amaxes = _with_amaxes(formula(total, gain, bias, epsilon).to(dtype).flatten(0, -2), amax, signs)
    return [h.view(total.shape), statistics, *([] if branch is None else [total]), *amaxes]


def norm_backward(dh, total, dtotal, gain, statistics, branch_dtype, received=None, rank=0) -> list[Tensor]:
    with torch.enable_grad():
        leaf, gain = total.detach().requires_grad_(), gain.detach().requires_grad_()
        bias = torch.zeros_like(gain, requires_grad=True) if len(statistics) == 2 else None
        leaves = [leaf, gain, *([] if bias is None else [bias])]
        dh = _sum(dh, received, rank).float()
        dx, *sums = torch.autograd.grad(formula(leaf, gain, bias, EPSILON), leaves, dh)
    dx = dx if dtotal is None else dx + dtotal
    return [dx, torch.stack(sums), *([] if branch_dtype is None else [dx.to(branch_dtype)])]


def formula(total: Tensor, gain: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    shape, total = total.shape[-1:], total.float()
    return F.rms_norm(total, shape, gain, epsilon) if bias is None else F.layer_norm(total, shape, gain, bias, epsilon)


def _sum(own: Tensor | None, received: Tensor | None, rank: int) -> Tensor | None:
    """A sum over ranks, of which the own summand is that of `rank`."""
    if received is None:
        return own
    assert received.shape[1:] == own.shape
    return sum(summand.float() for summand in (*received[:rank], own, *received[rank:])).to(own.dtype)


def install(monkeypatch, modules, quantizers, *, note: Callable[[str], None] = lambda name: None) -> None:
    """modules: those of hqsweep.nn that ask for kernels. quantizers: hqsweep.quant.hybrid. note: gets the name of a
    kernel at each call."""

    def noted(function: Callable) -> Callable:
        def run(*args):
            note(function.__name__)
            return function(*args)

        return run

    for module in modules:
        monkeypatch.setattr(module, "use_kernels", lambda x: True)
    for function in (activation, activation_backward, quantize_activated):
        for module in (*modules, quantizers):
            if hasattr(module, function.__name__):
                monkeypatch.setattr(module, function.__name__, noted(function))
