"""Linears shared over ranks, beside the same linear in one process and a sum that is split as theirs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import FEW, SAME
from support.parallel import compat_layers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from hqsweep import compat
from hqsweep.compat import CustomRecipe, IdentityQuantizer, autocast
from hqsweep.errors import UserError
from hqsweep.formats import ExactOperand
from hqsweep.formats.inputs import draw
from hqsweep.gemm.exact import mm_t
from hqsweep.nn import LayerNormLinear, Linear, LinearOptions, quantization, quantized_model_init
from hqsweep.nn.core.call import LinearCall
from hqsweep.optim import FusedAdam
from hqsweep.parallel.shared import overlapped_gemm
from hqsweep.parallel.tensor import ColwiseLinear, RowwiseLinear
from hqsweep.parallel.wire import collectives
from hqsweep.parallel.wire.local import local
from hqsweep.parallel.wire.tokens import gather_rows, sum_rows
from hqsweep.quant import HybridQuantizer
from hqsweep.recipe import LinearQuantizers

SPLIT = [("column", True, True), ("row", True, True)]
MODES = [(mode, split, False) for split in (False, True) for mode in ("column", "row")] + SPLIT
"""How a linear is cut, whether tokens lie split, and whether products are formed by the rows of each rank."""
M, PART = 128, 128
"""Tokens; features of a rank's part."""


def quantizers(text: str) -> LinearQuantizers:
    """A quantizer for all tensors, less what products refuse: transformed weights."""
    quantizer = HybridQuantizer.parse(text)
    plain = replace(quantizer, columnwise=quantizer.columnwise.rowwise_form)
    return LinearQuantizers(input=quantizer, weight=plain, grad_output=quantizer)


def linear(text: str, world: int, bias: bool) -> Linear:
    torch.manual_seed(0)
    module = Linear(world * PART, world * PART, name="l", recipe=quantizers(text), bias=bias)
    if bias:
        torch.nn.init.normal_(module.bias)
    return module


def tensors(step: int, world: int) -> tuple[Tensor, Tensor]:
    """x and dy of a step."""
    return draw("heavy", M, world * PART, step), draw("row_scaled", M, world * PART, step)


def run(module: Linear, x: Tensor, dy: Tensor, step: int) -> dict[str, Tensor]:
    """y and the gradients of x, weight and bias."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    with quantization(step=step):
        y = module(x)
    y.backward(dy)
    gradients = {f"d{name[0]}": p.grad for name, p in module.named_parameters()}
    own = {name: g.to_local() if hasattr(g, "to_local") else g for name, g in gradients.items()}
    return {"y": y.detach(), "dx": x.grad} | own


def columns(operand: ExactOperand, span: slice) -> ExactOperand:
    """Some of the contracted axis."""
    return replace(operand, matrix=operand.matrix[:, span])


def split_sum(a: ExactOperand, b: ExactOperand, world: int) -> Tensor:
    """mm_t by parts of the contracted axis, each rounded to bfloat16, added in float32 in order and rounded."""
    size = a.matrix.shape[1] // world
    spans = [slice(r * size, (r + 1) * size) for r in range(world)]
    total = sum(mm_t(columns(a, s), columns(b, s), out_dtype=torch.bfloat16).float() for s in spans)
    return total.bfloat16()


def whole_operands(module: Linear, x: Tensor, dy: Tensor, step: int) -> dict[str, ExactOperand]:
    """Operands of the split sums, as one process has them in this step; states are as a step leaves them."""
    with quantization(step=step), torch.no_grad():
        call = LinearCall(**module.linear_facts())
        weight = module.weight.bfloat16()
        return {
            "x": call.quantize("input", x, rowwise="exact").rowwise,
            "w": call.quantize("weight", weight, rowwise="exact").rowwise,
            "dy": call.quantize("grad_output", dy, rowwise="exact").rowwise,
            "w_column": call.quantize("weight", weight, columnwise="exact").columnwise,
        }


def differences(rank: int, world: int, texts: list[str]) -> list[str]:
    """What of column- and row-parallel linears is not to the byte what it should be."""
    mesh, faults = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), []
    for index, text in enumerate(texts):
        for mode, sequence, by_ranks in MODES if text in FEW else SPLIT if text in SAME else [SPLIT[index % 2]]:
            try:
                with mock.patch.object(overlapped_gemm, "hides", lambda x, by_ranks=by_ranks: by_ranks):
                    wrong = list(compared(text, mode, sequence, mesh, rank))
                faults += [f"{text} {mode} {sequence} {by_ranks} {name}" for name in wrong]
            except UserError as error:
                faults.append(f"{text} {mode} {sequence} {by_ranks}: {error}")
    return faults


def compared(text: str, mode: str, sequence: bool, mesh, rank: int) -> Iterator[str]:
    """Names of the results that differ, with their step."""
    whole, axis = linear(text, mesh.size(), not sequence), 0 if sequence else None
    style = (ColwiseLinear if mode == "column" else RowwiseLinear)(sequence=axis)
    part = parallelize_module(linear(text, mesh.size(), not sequence), mesh, style)

    def own(x: Tensor, axis: int) -> Tensor:
        return x.chunk(mesh.size(), axis)[rank]

    for step in (1, 2) if part.quantizers.input.delayed else (1,):
        x, dy = tensors(step, mesh.size())
        expected = run(whole, x, dy, step)
        operands = whole_operands(whole, x, dy, step)
        keep: Callable[[Tensor], Tensor] = (lambda t: own(t, 0)) if sequence else (lambda t: t)
        if mode == "column":
            got = run(part, keep(x), own(dy, 1), step)
            expected["dx"] = keep(split_sum(operands["dy"], operands["w_column"], mesh.size()))
            expected |= {name: own(expected[name], 0) for name in ("dw", "db") if name in got}
            expected["y"] = own(expected["y"], 1)
        else:
            got = run(part, own(x, 1), keep(dy), step)
            bias = 0 if whole.bias is None else whole.bias.detach().bfloat16()
            expected["y"] = keep(split_sum(operands["x"], operands["w"], mesh.size()) + bias)
            expected |= {"dx": own(expected["dx"], 1), "dw": own(expected["dw"], 1)}
        yield from (f"{name} of step {step}" for name in got if not torch.equal(got[name], expected[name]))


def refusals(rank: int, world: int) -> list[str]:
    """What styles and calls say of linears that ranks cannot share, and a main_grad that is added to."""
    mesh, said = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), []

    def column(n: int, k: int, text: str, **options: object) -> Linear:
        module = Linear(k, n, name="l", recipe=LinearQuantizers.parse(text, "test"), **options)
        return parallelize_module(module, mesh, ColwiseLinear())

    def held() -> Linear:
        with quantized_model_init():
            return column(48, 64, "mxfp8")

    x = torch.ones(32, 64)
    for refused in (
        lambda: column(97, 64, "bf16"),
        lambda: column(48, 64, "mxfp8")(x.clone().requires_grad_()).sum().backward(),
        lambda: parallelize_module(column(64, 64, "bf16"), mesh, RowwiseLinear()),
        lambda: parallelize_module(LayerNormLinear(64, 64, name="l", recipe="bf16"), mesh, RowwiseLinear()),
        lambda: parallelize_module(torch.nn.Linear(64, 64), mesh, RowwiseLinear()),
        held,
    ):
        with pytest.raises(UserError) as error:
            refused()
        said.append(str(error.value))
    return said


def main_gradients(rank: int, world: int) -> tuple[Tensor, Tensor, bool]:
    """The main_grad of a part after two backwards, of which the first overwrites what was there, what one process
    has, and whether parameters are told of it."""
    mesh, options = init_device_mesh("cpu", (world,)), LinearOptions(fuse_wgrad_accumulation=True)
    gradients, told = [], []
    for shared in (True, False):
        torch.manual_seed(0)
        module = Linear(64, 64 * world, name="l", recipe=quantizers("mxfp8"), options=options)
        module = parallelize_module(module, mesh, ColwiseLinear()) if shared else module
        module.weight.main_grad = torch.full_like(module.weight, float(shared), dtype=torch.float32)
        module.weight.grad_added_to_main_grad = False
        for step in (1, 2):
            module.weight.overwrite_main_grad = shared and step == 1
            y = module(draw("normal", 32, 64, step))
            y.backward(
                draw("normal", 32, 64 * world, step).chunk(world, 1)[rank]
                if shared
                else draw("normal", 32, 64 * world, step)
            )
        assert module.weight.grad is None
        gradients.append(module.weight.main_grad)
        told.append(module.weight.grad_added_to_main_grad)
    return gradients[0].to_local(), gradients[1].chunk(world)[rank], all(told)


def gathered_bytes(rank: int, world: int) -> dict[str, float]:
    """Bytes an element that a rank sends of its tokens in forward, and in backward."""
    mesh, sent = init_device_mesh("cpu", (world,)), {}
    gather = dist.all_gather_into_tensor
    for text in ("bf16", "mxfp8", "nvfp4", "fp8_block"):
        for style in (ColwiseLinear, RowwiseLinear):
            module = parallelize_module(linear(text, world, False), mesh, style(sequence=0))
            x = draw("normal", M // (world if style is ColwiseLinear else 1), module.weight.to_local().shape[1])
            count = []

            def counted(into: Tensor, x: Tensor, count: list = count, **options: object) -> object:
                count.append(x.nbytes)
                return gather(into, x, **options)

            with (
                mock.patch.object(dist, "all_gather_into_tensor", counted),
                mock.patch.object(collectives, "all_gather", counted),
            ):
                y = module(x.requires_grad_())
                forward = sum(count)
                y.backward(torch.ones_like(y))
            tokens = M // world * world * PART
            sent[f"{text} {style.__name__}"] = (forward / tokens, (sum(count) - forward) / tokens)
    return sent


def by_their_names(rank: int, world: int) -> list[str]:
    """What of TransformerEngine's Linear and LayerNormLinear over the ranks differs from the styles of this package."""
    mesh, faults = init_device_mesh("cpu", (world,)), []
    group, size, recipe = mesh.get_group(), world * 32, CustomRecipe(qfactory=lambda role: IdentityQuantizer())
    shared = {"tp_group": group, "tp_size": world, "sequence_parallel": True, "bias": False, "name": "l"}
    for kind, mode, style in (
        (compat.Linear, "column", ColwiseLinear),
        (compat.Linear, "row", RowwiseLinear),
        (compat.LayerNormLinear, "column", ColwiseLinear),
    ):
        torch.manual_seed(0)
        theirs = kind(size, size, parallel_mode=mode, fuse_wgrad_accumulation=True, **shared)
        theirs.weight.main_grad = torch.zeros_like(theirs.weight, dtype=torch.float32)
        torch.manual_seed(0)
        whole = kind(size, size, bias=False, name="l")
        ours = parallelize_module(whole, mesh, style(sequence=0))
        x = draw("normal", 32, size).chunk(world, 0 if mode == "column" else 1)[rank]
        results = []
        for module in (theirs, ours):
            own = x.clone().requires_grad_()
            with autocast(recipe=recipe):
                y = module(own)
            y.backward(torch.ones_like(y))
            results.append((y.detach(), own.grad))
        results[0] += (theirs.weight.detach(), theirs.weight.main_grad)
        results[1] += (ours.weight.to_local().detach(), ours.weight.grad.to_local())
        if not all(map(torch.equal, *results)) or theirs.weight.grad is not None:
            faults.append(f"{kind.__name__} {mode}")
    for refused in (
        {"in_features": 33, "out_features": 32, "parallel_mode": "row", "tp_size": 2},
        {"in_features": 32, "out_features": 32, "tp_size": 2},
        {"in_features": 32, "out_features": 32, "ub_overlap_ag": True},
        {"in_features": 32, "out_features": 32, "parallel_mode": "both"},
    ):
        with pytest.raises(UserError) as error:
            compat.Linear(**refused)
        faults.append(str(error.value))
    return faults


def moved(rank: int, world: int) -> bool:
    """Whether a held linear in fp8_delayed that is moved, before or after it is shared out, trains as one that stays:
    a move takes the states from a weight."""
    mesh, results = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)), []
    for before, after in ((False, False), (True, False), (False, True)):
        with quantized_model_init():
            module = linear("fp8_delayed", world, bias=False)
        for is_moved in (before, after):
            if is_moved:
                module._apply(torch.clone)
            if module.parallel is None:
                parallelize_module(module, mesh, ColwiseLinear(sequence=None))
        optimizer = FusedAdam(module.parameters(), lr=1e-2)
        for step in (1, 2):
            x, dy = tensors(step, world)
            run(module, x, dy.chunk(world, 1)[rank].contiguous(), step)
            optimizer.step()
        results.append([*local(module.weight).buffers.values()])
    return all(map(torch.equal, results[0] * 2, results[1] + results[2]))


def without_tokens(rank: int, world: int) -> list[tuple[int, ...]]:
    """Shapes of what is gathered and summed of no tokens."""
    group, x = init_device_mesh("cpu", (world,)).get_group(), torch.empty(0, 16, dtype=torch.bfloat16)
    return [tuple(of(x, group, lead).shape) for of in (gather_rows, sum_rows) for lead in (1, 2)]


def everything(rank: int, world: int, texts: list[str]) -> tuple:
    """All of it, in one launch."""
    return (
        differences(rank, world, texts),
        refusals(rank, world),
        main_gradients(rank, world),
        gathered_bytes(rank, world),
        by_their_names(rank, world),
        compat_layers.differences(rank, world),
        moved(rank, world),
        without_tokens(rank, world),
    )
