"""A step of GroupedLinear beside torch's own grouped products in bfloat16: the section `linear` of benchmarks.grouped.

`reached` is the time of torch._grouped_mm as a share of ours, wanted 0.9 of mxfp8, whoever computes our products: for
splits that the host knows, which are equal here, torch.bmm does. The floor is the time of the products alone, by that
same function of torch on bfloat16 in the same run, and the bytes of all operands beside them at the speed of a device
copy, by hand from the formats (gemm=exact multiplies bfloat16 operands):
  x    read; the rowwise operand written exact, the columnwise one as codes, which backward reads and writes exact
  w    each step: read and written exact in forward, and again in backward
       once a step (cache_weights, where the optimizer has written the weights since): read once, written exact twice
       kept (cache_weights, in later microbatches): nothing
  dy   read once, written exact in both directions
and what takes a scale from the amax of a tensor reads that tensor once more.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from benchmarks import rows
from benchmarks.timing import Call, host_seconds
from hqsweep.formats import Format
from hqsweep.nn import GroupedLinear, GroupedLinearOptions, quantization
from hqsweep.ops.quantize.operators import Matrices, Wanted, allocations
from hqsweep.recipe import Recipe

GOAL = 0.9
COMPOSER = {"input": "nvfp4+row_scaled|mxfp8@rowwise_dequantized", "weight": "nvfp4|mxfp8@rowwise_dequantized"}
RECIPES = {
    name: {"input": name, "weight": name, "grad_output": name} for name in ("bf16", "mxfp8", "fp8_block", "nvfp4")
} | {"Composer-2": COMPOSER | {"grad_output": "mxfp8"}}
WITH_GOAL = ("mxfp8",)
EXACT_BYTES = 2
Weights = Literal["each step", "once a step", "kept"]
"""How often weights are quantized. "each step": in each of two passes, without cache_weights; "once a step": with it,
if they were written since the step before; "kept": with it, if they are never written."""


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """The recipe, and where weights and splits are: the differences between the rows."""

    recipe: str
    weights: Weights
    """How often the weights are quantized."""
    on_device: bool
    """Whether the splits are a tensor on the device."""

    @property
    def named(self) -> rows.Row:
        splits = "device" if self.on_device else "list"
        return {"section": "linear", "case": self.recipe, "weights": self.weights, "splits": splits}


def cases() -> Iterator[StepCase]:
    """The cases of every recipe, and every place of weights and splits."""
    for recipe in RECIPES:
        for weights in get_args(Weights):
            for on_device in (False, True):
                yield StepCase(recipe=recipe, weights=weights, on_device=on_device)


class GroupedStep:
    """The tensors of one step, and torch's own products of them."""

    def __init__(self, experts: int, tokens: int, in_features: int, out_features: int, device: str, clock) -> None:
        options = {"device": device, "dtype": torch.bfloat16}
        self.sizes, self.features, self.clock = (tokens,) * experts, (in_features, out_features), clock
        self.x = torch.randn(experts * tokens, in_features, **options).requires_grad_()
        self.dy = torch.randn(experts * tokens, out_features, **options)
        self.w = torch.randn(experts, out_features, in_features, **options).requires_grad_()
        self.offsets = torch.tensor(self.sizes, device=device).cumsum(0).int()

    def plain(self) -> None:
        """Run forward and backward of torch._grouped_mm."""
        self.x.grad = self.w.grad = None
        torch._grouped_mm(self.x, self.w.transpose(1, 2), offs=self.offsets).backward(self.dy)

    def batched(self) -> tuple[Tensor, Tensor, Tensor]:
        """The three products by torch.bmm: y and dx [experts, tokens, ..], and dw."""
        x, w = self.x.detach(), self.w.detach()
        x, dy = (matrix.unflatten(0, (len(self.sizes), -1)) for matrix in (x, self.dy))
        return torch.bmm(x, w.mT), torch.bmm(dy, w), torch.bmm(dy.mT, x)

    def ours(self, case: StepCase) -> Call:
        """A call that runs forward and backward of a GroupedLinear, with new gradients."""
        recipe = Recipe.from_config({"linear": "bf16", "grouped_linear": RECIPES[case.recipe]})
        options = GroupedLinearOptions(single_grouped_weight=True)
        module = GroupedLinear(len(self.sizes), *self.features, name="layer", recipe=recipe, options=options).to(
            device=self.x.device, dtype=self.x.dtype
        )
        splits = torch.tensor(self.sizes, device=self.x.device) if case.on_device else list(self.sizes)

        def step() -> None:
            self.x.grad = module.weight.grad = None
            if case.weights == "once a step":
                module.workspace.clear()
            with quantization(step=1, cache_weights=case.weights != "each step"):
                y = module(self.x, splits)
            y.backward(self.dy)

        return step

    def bytes_beside(self, case: StepCase) -> int:
        """The bytes of the floor that are not the products'."""
        recipe = Recipe.from_config({"linear": "bf16", "grouped_linear": RECIPES[case.recipe]})
        quantizers = recipe.grouped_linear
        total = 0
        for tensor, matrix in (("input", self.x), ("weight", self.w), ("grad_output", self.dy)):
            quantizer = getattr(quantizers, tensor)
            row, column = quantizer.rowwise, quantizer.columnwise
            if row.high_precision and column.high_precision:
                continue
            read, exact = matrix.nbytes, matrix.numel() * EXACT_BYTES
            once = read * max(_reads(row), _reads(column)) + 2 * exact
            if tensor == "weight":
                twice = sum(read * _reads(f) + exact for f in (row, column))
                total += {"each step": twice, "once a step": once, "kept": 0}[case.weights]
                continue
            total += once + (2 * self._codes(column) if tensor == "input" else 0)
        return total

    def _codes(self, format: Format) -> int:
        """The bytes of x's columnwise operand."""
        matrices = Matrices(*self.x.shape, len(self.sizes), tuple(self.sizes))
        outputs = allocations(matrices, Wanted(format.text, True, False, False), self.x.is_cuda)
        return sum(count * dtype.itemsize for (count,), dtype in outputs)

    def measure(self, case: StepCase, copy: Callable[[], Tensor], copied: int) -> rows.Row:
        """The row of a case; `copy`, which moves `copied` bytes, is timed beside it."""
        step = self.ours(case)
        time = self.clock.medians({"ours": step, "torch": self.plain, "bmm": self.batched, "copy": copy})
        products = time["torch" if case.on_device else "bmm"]
        floor = products + self.bytes_beside(case) / (copied / time["copy"])
        reached = time["torch"] / time["ours"]
        row = {"floor_us": floor * 1e6, "reachable": time["torch"] / floor, "reached": reached}
        row |= {"products_us": products * 1e6}
        row |= {"us": time["ours"] * 1e6, "torch_us": time["torch"] * 1e6}
        if self.x.is_cuda:
            row |= {
                "host_us": host_seconds(step, calls=10) * 1e6,
                "torch_host_us": host_seconds(self.plain, calls=10) * 1e6,
            }
        judged = case.recipe in WITH_GOAL
        return row | ({"goal": GOAL, "pass": reached >= GOAL} if judged else {})


def _reads(format: Format) -> int:
    """The passes over the tensor: one more finds its amax."""
    return 2 if format.amax_name else 1
