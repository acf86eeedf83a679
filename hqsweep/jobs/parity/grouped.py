"""The check `grouped` of the parity job: a grouped linear, and the router of a mixture of experts, to the byte.

list of Linears    y, dx, dw and db of every expert equal a Linear for that expert alone. It covers each format
                   in all slots, all ordered pairs with both columnwise sources, and RECIPES. Splits are uneven, some
                   are zero. Delayed scaling is compared at the second step, whose scales come from the first
permuted experts   other numbers for the experts give the same results under these numbers. Formats with stochastic
                   rounding are left out, because their bits belong to the number
permuted tokens    another order of the tokens of each expert. y and dx follow the order, except in formats whose
                   rowwise scales stand for a tile of several rows. dw changes only by the order of its sums, except in
                   formats whose columnwise scales stand for a block of tokens. Scales of whole experts do not change
moved blocks       another order of whole blocks of tokens of each expert. y and dx follow the order, and dw changes
                   only by the order of its sums, in every format
router             routing under a recipe equals routing without quantization
torch._grouped_mm  where a GPU has it: its results against the loop's, for splits on the device and bfloat16 outputs

On a GPU the first three use modules of float32, which the loop computes there.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor, nn

from hqsweep.config.job import ParityConfig
from hqsweep.formats import Format, bases, parse
from hqsweep.formats.inputs import draw
from hqsweep.formats.spec import SOURCES
from hqsweep.gemm.native import Capability, GroupGemm, capability_of, gemm_plan
from hqsweep.jobs.parity.compare_bytes import Check, Rows, named_pairs, row
from hqsweep.nn import GroupedLinear, GroupedLinearOptions, LayerNormMoE, Linear, MoEOptions, quantization
from hqsweep.nn.router import Routing
from hqsweep.ops.splits import Splits
from hqsweep.ops.stats import output_error
from hqsweep.quant.hybrid import DIRECTIONS
from hqsweep.recipe.sectioned import Recipe
from hqsweep.recipe.sections import LinearQuantizers

K, N = 48, 32
SPLITS = (48, 0, 16, 80)
LONG_SPLITS = (288, 0, 32, 272)
"""The rows of each expert. Two experts have two whole blocks of 128 tokens and a part of a third."""
EXPERTS = len(SPLITS)
RECIPES = {
    "nvfp4_row_scaled_fwd_mxfp8_bwd": {
        "input": "nvfp4+row_scaled|mxfp8@rowwise_dequantized", "weight": "nvfp4|mxfp8@rowwise_dequantized",
        "grad_output": "mxfp8",
    },
    "nvfp4_row_scaled_fwd_mxfp8_bwd_original": {
        "input": "nvfp4+row_scaled|mxfp8", "weight": "nvfp4|mxfp8", "grad_output": "mxfp8",
    },
    "nvfp4 recipe": {"input": "nvfp4+rht", "weight": "nvfp4+2d", "grad_output": "nvfp4+rht+sr"},
    "fp8_delayed": {"input": "fp8_delayed", "weight": "fp8_delayed", "grad_output": "fp8_delayed+e5m2"},
}  # fmt: skip
"""Recipes that are neither one format in all slots nor a pair."""
HIGH = LinearQuantizers.parse("bf16", "parity")
ORDER_OF_SUMS = 1e-4
"""The bound of the relative L2 between float32 sums of some hundred products in different orders."""
STORED = 2.0**-7
"""The bound of the relative L2 of results that torch._grouped_mm has rounded to bfloat16; twice that where factors
follow."""
Results = dict[str, Tensor]


def everywhere(format: Format) -> LinearQuantizers:
    """A format in both directions of all three tensors, without options that a slot may not have.

    Left out are row_scaled columnwise, and the Hadamard transform rowwise and on weights.
    """
    row, column = format.rowwise_form, format.columnwise_form
    quantizers = {t: f"{row}|{column}" for t in ("input", "grad_output")}
    return LinearQuantizers.parse(quantizers | {"weight": f"{row}|{column.rowwise_form}"}, "parity")


def grouped_check(config: ParityConfig, device: torch.device) -> Rows:
    """Rows for each format, every pair of base formats, and RECIPES."""
    recipes = {name: LinearQuantizers.parse(section, "parity") for name, section in RECIPES.items()}
    sections = {text: everywhere(parse(text)) for text in config.parity.formats}
    for a, b, source in product(bases(), bases(), SOURCES):
        pair = f"{a}|{b}@{source}"
        quantizers = {"input": pair, "weight": pair, "grad_output": b}
        sections[f"{a}|{b}" if source == "original" else pair] = LinearQuantizers.parse(quantizers, "parity")
    for subject, quantizers in (sections | recipes).items():
        problem = _Problem(quantizers, SPLITS, device, config.seed)
        yield row("grouped", subject, "list of Linears", named_pairs(problem.by_linears(), problem.run()))
    for subject, quantizers in ({text: sections[text] for text in config.parity.formats} | recipes).items():
        yield from _permutation_rows(subject, quantizers, device, config.seed)
    for text in config.parity.formats:
        yield _router_row(text, sections[text], device, config.seed)
    yield from kernel_rows(config, device)


def kernel_rows(config: ParityConfig, device: torch.device, capability: Capability = None) -> Rows:
    """Rows of torch._grouped_mm for each format that the device can multiply. capability: follow the plans of another
    device."""
    capability = capability or capability_of(device)
    for text in config.parity.formats:
        quantizers = everywhere(parse(text))
        if _has_kernel(quantizers, capability):
            problem = _Problem(quantizers, SPLITS, device, config.seed)
            yield _kernel_row(text, problem, capability)


class _Expert(Linear):
    """The Linear that equals one expert: it draws the expert's random bits."""

    module_type = "grouped_linear"
    expert = 0


class _Problem:
    """The weights, biases, tokens and gradients of a grouped linear.

    Each expert has another magnitude, so that the largest values, and the scales, differ.
    """

    def __init__(self, quantizers: LinearQuantizers, splits: Sequence[int], device: torch.device, seed: int) -> None:
        self.quantizers, self.splits, self.device = quantizers, tuple(splits), device
        self.plan_capability: Capability = None
        self.dtype = torch.float32 if device.type == "cuda" else torch.bfloat16
        shapes = {"x": (sum(splits), K), "dy": (sum(splits), N), "w": (EXPERTS * N, K), "b": (EXPERTS, N)}
        drawn = {name: draw("heavy", *shape, seed + i).clamp(-50, 50) for i, (name, shape) in enumerate(shapes.items())}
        size = 0.7 ** torch.arange(EXPERTS)
        rows = size.repeat_interleave(torch.tensor(self.splits))[:, None]
        self.x, self.dy = ((drawn[name].float() * rows).to(device, self.dtype) for name in ("x", "dy"))
        self.w = (drawn["w"].view(EXPERTS, N, K).float() * size[:, None, None]).to(device)
        self.b = drawn["b"].float().to(device)

    def run(self, splits: Splits | None = None) -> Results:
        """The results of a GroupedLinear: y, dx [tokens, ...], dw, db [E, ...]."""
        recipe = Recipe(linear=HIGH, grouped_linear=self.quantizers)
        single = {"single_grouped_weight": True, "single_grouped_bias": True, "plan_capability": self.plan_capability}
        options = GroupedLinearOptions(bias=True, **single)
        module = GroupedLinear(EXPERTS, K, N, name="m", recipe=recipe, dtype=self.dtype, options=options)
        module = module.to(self.device)
        _write(module, self.w, self.b)
        return self._stepped(module, self.x, self.dy, list(self.splits) if splits is None else splits)

    def by_linears(self) -> Results:
        """The results of a Linear for each expert."""
        parts = zip(range(EXPERTS), self.parts(self.x), self.parts(self.dy), strict=True)
        experts = [self._by_linear(*part) for part in parts]
        tokens = {name: torch.cat([results[name] for results in experts]) for name in ("y", "dx")}
        return tokens | {name: torch.stack([results[name] for results in experts]) for name in ("dw", "db")}

    def _by_linear(self, expert: int, x: Tensor, dy: Tensor) -> Results:
        linear = _Expert(K, N, name="m", recipe=self.quantizers, bias=True, dtype=self.dtype).to(self.device)
        linear.expert = expert
        _write(linear, self.w[expert], self.b[expert])
        return self._stepped(linear, x, dy)

    def _stepped(self, module: nn.Module, x: Tensor, dy: Tensor, *splits: list[int] | Splits) -> Results:
        """The results of the first step, or of the second where scales come from the step before."""
        for step in range(1, 2 + any(format.delayed for format in _formats(self.quantizers))):
            module.zero_grad()
            x = x.detach().clone().requires_grad_()
            with quantization(step=step):
                y = module(x, *splits)
                y.backward(dy)
        return {"y": y.detach(), "dx": x.grad, "dw": module.weight.grad, "db": module.bias.grad}

    def parts(self, tokens: Tensor) -> Sequence[Tensor]:
        """The rows of each expert."""
        return tokens.split(self.splits)

    def in_dtype(self, dtype: torch.dtype) -> "_Problem":
        """The problem for a module of another dtype."""
        self.dtype, self.x, self.dy = dtype, self.x.to(dtype), self.dy.to(dtype)
        return self

    def with_experts(self, numbers: Sequence[int]) -> "_Problem":
        """The problem with expert numbers[i] as number i."""
        other = _Problem(self.quantizers, [self.splits[n] for n in numbers], self.device, 0)
        other.x, other.dy = (torch.cat([self.parts(t)[n] for n in numbers]) for t in (self.x, self.dy))
        other.w, other.b = self.w[list(numbers)], self.b[list(numbers)]
        return other

    def with_tokens(self, order: Tensor) -> "_Problem":
        """The problem with rows in another order."""
        other = _Problem(self.quantizers, self.splits, self.device, 0)
        other.x, other.dy, other.w, other.b = self.x[order], self.dy[order], self.w, self.b
        return other


def _formats(quantizers: LinearQuantizers) -> list[Format]:
    return [
        getattr(getattr(quantizers, tensor), direction) for tensor in quantizers.tensors() for direction in DIRECTIONS
    ]


def _write(module: nn.Module, weight: Tensor, bias: Tensor) -> None:
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(bias)


def _permutation_rows(subject: str, quantizers: LinearQuantizers, device: torch.device, seed: int) -> Iterator[dict]:
    if any(format.stochastic for format in _formats(quantizers)):
        return
    problem = _Problem(quantizers, LONG_SPLITS, device, seed)
    expected, numbers = problem.run(), (2, 3, 0, 1)
    moved = problem.with_experts(numbers).run()
    tokens = {name: torch.cat([problem.parts(expected[name])[n] for n in numbers]) for name in ("y", "dx")}
    weights = {name: expected[name][list(numbers)] for name in ("dw", "db")}
    yield row("grouped", subject, "permuted experts", named_pairs(tokens | weights, moved))
    yield from _token_rows(subject, "permuted tokens", problem, expected, 1)
    formats = [getattr(q, d) for q in (quantizers.input, quantizers.grad_output) for d in DIRECTIONS]
    block = max(max(buffer.rows, buffer.cols) for format in formats for buffer in format.layout.values())
    if block > 1:
        yield from _token_rows(subject, "moved blocks", problem, expected, block)


def _token_rows(subject: str, case: str, problem: _Problem, expected: Results, block: int) -> Iterator[dict]:
    """Rows of a problem whose runs of `block` tokens are put in another order, for the results that must follow."""
    starts = (sum(problem.splits[:expert]) for expert in range(EXPERTS))
    order = torch.cat([start + _shuffled(size, block) for start, size in zip(starts, problem.splits, strict=True)])
    order = order.to(problem.device)
    moved, quantizers = problem.with_tokens(order).run(), problem.quantizers
    followed = {name: expected[name][order] for name in ("y", "dx")}
    rowwise, columnwise = (
        max(getattr(buffer, along) for q in (quantizers.input, quantizers.grad_output)
            for buffer in getattr(q, direction).layout.values())
        for direction, along in (("rowwise", "rows"), ("columnwise", "cols"))
    )  # fmt: skip
    if rowwise <= block:
        yield row("grouped", subject, f"{case}: y and dx", named_pairs(followed, moved))
    if columnwise <= block:
        errors = {"dw": output_error(expected["dw"].float(), moved["dw"].float())["rel_l2"]}
        yield _near_row(subject, f"{case}: dw", errors, ORDER_OF_SUMS, expected["dw"].numel())


def _shuffled(size: int, block: int) -> Tensor:
    """int64 [size]: indices of whole blocks in another order, then the rest."""
    count = size // block
    blocks = torch.arange(count * block).view(count, block).flip(0)
    if block == 1:
        blocks = blocks[torch.randperm(count, generator=torch.Generator().manual_seed(size))]
    return torch.cat([blocks.flatten(), torch.arange(count * block, size)])


def _near_row(subject: str, case: str, errors: dict[str, float], bound: float, total: int) -> dict[str, object]:
    """A row with PASS where every relative L2 error is below the bound."""
    text = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    status = "PASS" if all(error < bound for error in errors.values()) else "FAIL"
    note = f"relative L2: {text}; below {bound:.1e}"
    return row("grouped", subject, case, {}) | {"status": status, "total": total, "note": note}


def _router_row(subject: str, quantizers: LinearQuantizers, device: torch.device, seed: int) -> dict[str, object]:
    """The row of weights, choices and balance of a mixture with quantized experts and neighbours."""
    routings: list[Results] = []

    def keep(router: nn.Module, inputs: tuple[Tensor], routing: Routing) -> None:
        routings.append({name: getattr(routing, name) for name in ("weights", "chosen", "balance", "tokens")})

    for section in (HIGH, quantizers):
        moe = LayerNormMoE(K, N, name="m", recipe=section, options=MoEOptions(experts=EXPERTS, top_k=2)).to(device)
        with torch.no_grad():
            moe.router.weight.copy_(draw("normal", EXPERTS, K, seed))
            moe.router.register_forward_hook(keep)
            moe(draw("normal", 64, K, seed + 1).to(device))
    return row("grouped", subject, "router", named_pairs(*routings))


def _has_kernel(quantizers: LinearQuantizers, capability: Capability) -> bool:
    """Whether wgrad is one kernel. That holds only where the other GEMMs are, too."""
    group = GroupGemm(gemm="wgrad", out_dtype=torch.float32, sizes=(K, N), host_splits=False)
    a, b = quantizers.grad_output.columnwise, quantizers.input.columnwise
    return gemm_plan(a, b, capability, group=group).one_kernel


def _kernel_row(subject: str, problem: _Problem, capability: Capability) -> dict[str, object]:
    """The row that compares results for splits on the device with the loop's, by their relative L2."""
    problem, device = problem.in_dtype(torch.float32), problem.device
    expected, sizes = problem.run(), torch.tensor(SPLITS, device=device)
    unknown = Splits(rows=sum(SPLITS), count=EXPERTS, sizes=None, device_sizes=sizes)
    problem.plan_capability = capability
    moved = problem.in_dtype(torch.bfloat16).run(unknown)
    errors = {name: output_error(expected[name].float(), moved[name].float())["rel_l2"] for name in ("y", "dx", "dw")}
    total = sum(expected[name].numel() for name in errors)
    return _near_row(subject, "torch._grouped_mm", errors, STORED, total)


GROUPED_CHECKS: dict[str, Check] = {"grouped": grouped_check}
