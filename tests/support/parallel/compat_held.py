"""TransformerEngine's linears over ranks whose weights are held quantized, and its experts, beside one process."""

import copy
import io
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from cases import RANDOM, crossed
from support.parallel import shared_linears
from support.parallel.compat_layers import CUTS, buffers_that_differ
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hqsweep import compat
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.gemm.exact import mm_t
from hqsweep.nn import autocast, quantization, quantized_model_init
from hqsweep.optim import FusedAdam
from hqsweep.quant import quantize_master_weights
from hqsweep.recipe import LinearQuantizers

SPLITS, PART = [64, 0, 32], 32
"""Rows of each expert; features of a rank's part."""


def everything(rank: int, world: int, texts: list[str], few: list[str]) -> tuple:
    """All that is compared of linears over ranks, in one launch."""
    own = held_linears(rank, world, few), experts(rank, world, few), refusals(rank, world)
    return shared_linears.everything(rank, world, texts), own


def held_linears(rank: int, world: int, texts: list[str]) -> list[str]:
    """What of held weights is not, to the byte, this rank's part of what one process has: when they are built, after
    two steps of training, after another that goes on from a checkpoint, and after fragments of masters are written; and
    of ones that come from the meta device."""
    group, faults = init_device_mesh("cpu", (world,)).get_group(), []
    for index, (text, mode) in enumerate(crossed(texts, CUTS, whole=("nvfp4", "fp8_current", RANDOM))):
        case = Case(group=group, text=text, mode=mode, assign=bool(index % 2))
        faults += [f"{text} {mode}: {n}" for n in (*trained_differs(case), *moved_differs(case))]
    return faults


@dataclass(frozen=True, kw_only=True)
class Case:
    group: Any
    text: str
    mode: str
    assign: bool
    """Whether a checkpoint's tensors become the parameters."""

    @property
    def recipe(self) -> LinearQuantizers:
        return shared_linears.quantizers(self.text)

    def build(self, **options: object) -> compat.Linear:
        size = self.group.size() * shared_linears.PART
        if self.mode == "column":
            options["init_method"] = nn.init.xavier_normal_
        torch.manual_seed(0)
        held = quantized_model_init(recipe=self.recipe, preserve_high_precision_init_val=True)
        with held, quantization(seed=1, step=0):
            return compat.Linear(size, size, bias=False, name="l", **options)

    def share(self, **options: object) -> compat.Linear:
        """The linear over ranks; without a tp_group before it knows its ranks."""
        return self.build(parallel_mode=self.mode, tp_size=self.group.size(), sequence_parallel=True, **options)

    def own(self, x: Tensor) -> Tensor:
        """This rank's part of what is cut as the weight is."""
        return x.chunk(self.group.size(), CUTS[self.mode])[self.group.rank()]

    def wrong(self, when: str, own: nn.Module, whole: nn.Module) -> list[str]:
        place = (1, self.group.rank(), self.group.size())
        return [f"{when} {n}" for n in buffers_that_differ(own.weight, whole.weight, CUTS[self.mode], place)]


def trained_differs(case: Case) -> Iterator[str]:
    whole, own, later = case.build(), case.share(tp_group=case.group), case.share()
    torch.manual_seed(0)
    later.set_tensor_parallel_group(case.group)
    trained = [(module, FusedAdam(module.parameters(), lr=1e-2)) for module in (whole, own)]
    yield from (*case.wrong("built", own, whole), *case.wrong("later", later, whole))
    for step in (1, 2, 3):
        if step == 3:
            trained[1] = resumed(*trained[1], later, assign=case.assign)
        for module, optimizer in trained:
            train(module, optimizer, case, step)
        yield from case.wrong(f"step {step}", trained[1][0], whole)
    values = draw("heavy", *whole.weight.shape, 9)
    whole.weight.detach().quantize_(values)
    quantize_master_weights([later.weight.detach()], [case.own(values).reshape(-1)], [0])
    yield from case.wrong("written", later, whole)


def moved_differs(case: Case) -> Iterator[str]:
    whole = case.build()
    with torch.device("meta"):
        own = copy.deepcopy(case.share(tp_group=case.group))
    own.to_empty(device="cpu")
    if not case.recipe.weight.delayed:  # whose states a weight has again when the module is called, or draws it
        values = draw("heavy", *whole.weight.shape, 9)
        whole.load_state_dict({"weight": values})
        own.load_state_dict({"weight": case.own(values)})
        yield from case.wrong("loaded", own, whole)
    for module in (whole, own):
        torch.manual_seed(2)
        module.reset_parameters()
    yield from case.wrong("drawn", own, whole)


def train(module: compat.Linear, optimizer: FusedAdam, case: Case, step: int) -> None:
    """One step, of all tokens or of this rank's part of them, and of x or dy."""
    x, dy = shared_linears.tensors(step, case.group.size())
    if module.parallel is not None:
        axes = (0, 1) if case.mode == "column" else (1, 0)
        x, dy = (t.chunk(case.group.size(), axis)[case.group.rank()] for t, axis in zip((x, dy), axes, strict=True))
    with autocast(recipe=case.recipe), quantization(seed=1, step=step):
        y = module(x.contiguous())
    y.backward(dy.contiguous())
    optimizer.step()
    optimizer.zero_grad()


def resumed(
    module: compat.Linear, optimizer: FusedAdam, fresh: compat.Linear, *, assign: bool
) -> tuple[compat.Linear, FusedAdam]:
    """`fresh` with the state of a module and its optimizer, from a file."""
    file = io.BytesIO()
    torch.save((module.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    of_module, of_optimizer = torch.load(file, weights_only=True)
    fresh.load_state_dict(of_module, assign=assign)
    anew = FusedAdam(fresh.parameters(), lr=1e-2)
    anew.load_state_dict(of_optimizer)
    return fresh, anew


def experts(rank: int, world: int, texts: list[str]) -> list[str]:
    """What of GroupedLinear is not this rank's part of what one process has, or of the summand that it leaves to be
    summed not that of one process's operands; with weights in one parameter or each in its own, plain or held."""
    group, faults = init_device_mesh("cpu", (world,)).get_group(), []
    for text in texts:
        recipe = shared_linears.quantizers(text)
        if not recipe.stochastic and recipe.input.rowwise.amax_name is None:
            continue  # whose parts need nothing of each other
        for mode in CUTS:
            for single in (False, True):
                faults += [f"{text} {mode} {single} {n}" for n in experts_differ(recipe, mode, single, group)]
    return faults


def experts_differ(recipe: LinearQuantizers, mode: str, single: bool, group) -> Iterator[str]:
    rank, world, size, rows = group.rank(), group.size(), group.size() * PART, sum(SPLITS)
    shared = {"parallel_mode": mode, "tp_size": world, "tp_group": group}

    def build(held: bool, **options: object) -> compat.GroupedLinear:
        torch.manual_seed(0)
        init = quantized_model_init(recipe=recipe) if held else nullcontext()
        with init, quantization(seed=1, step=0):
            return compat.GroupedLinear(
                len(SPLITS), size, size, bias=False, name="e", single_grouped_weight=single, **options
            )

    cuts = {"y": 1, "dx": None, "dw": 0} if mode == "column" else {"y": None, "dx": 1, "dw": 1}
    for held in (False, True) if single else (True,):
        whole, own = build(held), build(held, **shared)
        for step in (1, 2) if recipe.input.delayed else (1,):
            x, dy = draw("heavy", rows, size, step), draw("row_scaled", rows, size, step)
            expected = run(whole, recipe, x, dy, step)
            halves = (x, dy.chunk(world, 1)[rank]) if mode == "column" else (x.chunk(world, 1)[rank], dy)
            actual = run(own, recipe, *(t.contiguous() for t in halves), step)
            for name, axis in cuts.items():
                if axis is not None:
                    parts = [t.chunk(world, t.dim() - 2 + axis)[rank] for t in expected[name]]
                else:
                    parts = summands(mode, recipe, whole, x, dy, rank)
                if parts and not all(map(torch.equal, actual[name], parts)):
                    yield f"held={held} step {step} {name}"
        if held:
            for part, matrix in zip(own.weights, whole.weights, strict=True):
                yield from buffers_that_differ(part, matrix, CUTS[mode], (1, rank, world))


def run(module: compat.GroupedLinear, recipe: LinearQuantizers, x: Tensor, dy: Tensor, step: int) -> dict:
    """y and the gradients of x and the weights."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    with autocast(recipe=recipe), quantization(seed=1, step=step):
        y = module(x, SPLITS)
    y.backward(dy)
    return {"y": [y.detach()], "dx": [x.grad], "dw": [p.grad for p in module.parameters()]}


def summands(mode: str, recipe: LinearQuantizers, whole: compat.GroupedLinear, x: Tensor, dy: Tensor, rank: int):
    """What a rank returns of y, or dx, from its part of the contracted axis of one process's operands; nothing where
    these depend on more than values."""
    if recipe.stochastic or recipe.weight.delayed:
        return []
    span, parts = slice(rank * PART, (rank + 1) * PART), []
    for rows, weight in zip(zip(x.split(SPLITS), dy.split(SPLITS), strict=True), whole.expert_weights(), strict=True):
        matrix = (weight.dequantize() if hasattr(weight, "quantizer") else weight).detach().bfloat16()
        held = weight if hasattr(weight, "quantizer") else recipe.weight.quantize(matrix)
        if mode == "column":
            a, b = recipe.grad_output.quantize(rows[1], rowwise="exact").rowwise, held.columnwise.operand()
        else:
            a, b = recipe.input.quantize(rows[0], rowwise="exact").rowwise, held.rowwise.operand()
        sides = (shared_linears.columns(side, span) for side in (a, b))
        parts.append(mm_t(*sides, out_dtype=torch.bfloat16))
    return [torch.cat(parts)]


def refusals(rank: int, world: int) -> list[str]:
    """What is said of held parts that cut a block."""
    group, said = init_device_mesh("cpu", (world,)).get_group(), []
    shared = {"parallel_mode": "row", "tp_size": world, "tp_group": group, "bias": False, "name": "m"}
    for build in (compat.Linear, lambda *sizes, **options: compat.GroupedLinear(2, *sizes, **options)):
        try:
            with quantized_model_init(recipe="mxfp8"):
                build(96, 64, **shared)
        except UserError as error:
            said.append(str(error))
    return said
