"""Checks of the parity job on whole modules: y, dx and the gradient of every parameter.

modules    Linear, LayerNormLinear, LayerNormMLP and TransformerLayer under every ordered pair of base formats, against
           their composition from format references (composed)
switch     a module whose recipe is changed after a step against a fresh one under the new recipe
export     a module under a recipe against the same under the TransformerEngine factory that the recipe is exported to
causality  codes and outputs of earlier tokens when the last token changes: only formats whose scales stand for several
           tokens may leak
"""

import re
from collections.abc import Callable
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hqsweep.compat.export import to_transformer_engine
from hqsweep.config.job import ParityConfig
from hqsweep.formats import ExactOperand, Format, RngKey, bases, parse
from hqsweep.formats.inputs import draw
from hqsweep.gemm.exact import mm_t
from hqsweep.jobs.parity.compare_bytes import Check, Rows, named_pairs, row
from hqsweep.nn import (
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MLPOptions,
    MultiheadAttention,
    TransformerLayer,
    TransformerOptions,
    quantization,
    set_recipe,
)
from hqsweep.nn.layernorm_linears import ACTIVATIONS
from hqsweep.nn.norm_embedding import Norm
from hqsweep.ops.stats import output_error
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.argument import parse_recipe
from hqsweep.recipe.custom import CustomRecipe
from hqsweep.recipe.sectioned import Recipe


class _Linear(torch.autograd.Function):
    """y = x w^T + b by formula, from x [M, K] in the module's dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, b: Tensor | None, module: Linear) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, w)
        y = mm_t(_row(module, "input", x), _row(module, "weight", w.to(module.dtype)), out_dtype=module.dtype)
        return y if b is None else y + b.to(module.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        module, (x, w) = ctx.module, ctx.saved_tensors
        dx = mm_t(
            _row(module, "grad_output", dy), _column(module, "weight", w.to(module.dtype)), out_dtype=module.dtype
        )
        dw = mm_t(_column(module, "grad_output", dy), _column(module, "input", x), out_dtype=w.dtype)
        return dx, dw, dy.sum(0, dtype=torch.float32) if ctx.needs_input_grad[2] else None, None


def composed(module: nn.Module, x: Tensor) -> Tensor:
    """module(x) by formula, with its parameters and quantizers, for modules with linears. Attention is in high
    precision."""
    match module:
        case LayerNormLinear():
            return _linear(module, _norm(module.norm, x))
        case Linear():
            return _linear(module, x)
        case LayerNormMLP():
            return _linear(module.fc2, ACTIVATIONS[module.activation](composed(module.fc1, x).float()))
        case MultiheadAttention():
            b, t, d = x.shape
            heads = composed(module.qkv, x).view(b, t, 3, module.heads, -1).permute(2, 0, 3, 1, 4)
            q, k, v = heads if heads.is_cuda else heads.float()
            o = F.scaled_dot_product_attention(q, k, v, is_causal=module.is_causal)
            return _linear(module.proj, o.transpose(1, 2).reshape(b, t, d))
        case TransformerLayer():
            x = x + composed(module.attn, x).to(x.dtype)
            return x + composed(module.mlp, x).to(x.dtype)
    raise TypeError(f"no composition of {type(module).__name__}")


def _linear(module: Linear, x: Tensor) -> Tensor:
    y = _Linear.apply(x.reshape(-1, x.shape[-1]).to(module.dtype), module.weight, module.bias, module)
    return y.view(*x.shape[:-1], -1)


def _norm(norm: Norm, x: Tensor) -> Tensor:
    if norm.bias is None:
        return F.rms_norm(x.float(), x.shape[-1:], norm.weight, norm.epsilon)
    return F.layer_norm(x.float(), x.shape[-1:], norm.weight, norm.bias, norm.epsilon)


def _row(module: Linear, tensor: str, x: Tensor) -> ExactOperand:
    format = getattr(module.quantizers, tensor).rowwise
    return format.operand(format.encode(x, None, _key(module, tensor, "rowwise")), tuple(x.shape))


def _column(module: Linear, tensor: str, x: Tensor) -> ExactOperand:
    quantizer: HybridQuantizer = getattr(module.quantizers, tensor)
    if quantizer.columnwise_source == "rowwise_dequantized":
        codes = quantizer.rowwise.encode(x, None, _key(module, tensor, "rowwise"))
        x = quantizer.rowwise.decode(codes, tuple(x.shape)).to(x.dtype)
    x, format = x.t(), quantizer.columnwise
    return format.operand(format.encode(x, None, _key(module, tensor, "columnwise")), tuple(x.shape))


def _key(module: Linear, tensor: str, direction: str) -> RngKey:
    """The key outside of any quantization(): seed 0, step 0."""
    return RngKey(seed=0, slot=f"{module.name}/linear/{tensor}/{direction}", step=0)


BATCH, CONTEXT, DIM, FFN, HEADS = 2, 64, 64, 96, 2
BASE_FORMATS = (*bases(), "fp8_current+e5m2")
GELU = MLPOptions(activation="gelu")
LAYER_NORM = TransformerOptions(bias=True, normalization="LayerNorm")
MODULES: dict[str, Callable[[Recipe], nn.Module]] = {
    "Linear": lambda recipe: Linear(DIM, FFN, name="m", recipe=recipe, bias=True),
    "LayerNormLinear": lambda recipe: LayerNormLinear(DIM, FFN, name="m", recipe=recipe),
    "LayerNormMLP": lambda recipe: LayerNormMLP(DIM, FFN, name="m", recipe=recipe, bias=True, options=GELU),
    "TransformerLayer": lambda recipe: TransformerLayer(DIM, FFN, HEADS, name="m", recipe=recipe, options=LAYER_NORM),
}
RECIPES: dict[str, dict[str, object]] = {
    "mxfp8": {"linear": "mxfp8"},
    "fp8_block": {"linear": {"input": "fp8_block", "weight": "fp8_block+2d", "grad_output": "fp8_block"}},
    "nvfp4 recipe": {"linear": {"input": "nvfp4+rht", "weight": "nvfp4+2d", "grad_output": "nvfp4+rht+sr"}},
    "nvfp4 fwd, mxfp8 bwd": {"linear": "nvfp4|mxfp8@rowwise_dequantized"},
    "fp8 attention": {"linear": "mxfp8", "dpa": {"qkv": "fp8_current", "do": "fp8_current+e5m2"}},
    "one linear high": {"linear": "nvfp4", "overrides": [{"name": "*.fc2", "linear": "bf16"}]},
}


def modules_check(config: ParityConfig, device: torch.device) -> Rows:
    """Rows of 36 pairs of formats, with gradients in the columnwise one."""
    for a, b in product(BASE_FORMATS, repeat=2):
        for source in ("original", "rowwise_dequantized"):
            pair = f"{a}|{b}@{source}"
            recipe = Recipe.from_config({"linear": {"input": pair, "weight": pair, "grad_output": b}})
            for name in MODULES if source == "original" else ("LayerNormLinear",):
                module = _initialised(MODULES[name](recipe), config.seed).to(device)
                expected = _gradients(module, lambda x, module=module: composed(module, x), config.seed)
                actual = _gradients(module, module, config.seed, kernels=False)  # their sums are in torch's order
                yield row("modules", f"{a}|{b}" if source == "original" else pair, name, named_pairs(expected, actual))


def switch_check(config: ParityConfig, device: torch.device) -> Rows:
    """Rows of modules that change from each recipe to the next one, and from the last back to the first."""
    names = [*RECIPES, next(iter(RECIPES))]
    for old, new in pairwise(names):
        first, second = (Recipe.from_config(RECIPES[name]) for name in (old, new))
        module = _initialised(MODULES["TransformerLayer"](first), config.seed).to(device)
        _gradients(module, module, config.seed)
        set_recipe(module, second)
        fresh = _initialised(MODULES["TransformerLayer"](second), config.seed).to(device)
        pairs = named_pairs(*(_gradients(m, m, config.seed) for m in (fresh, module)))
        yield row("switch", f"{old} -> {new}", "TransformerLayer", pairs)


def export_check(config: ParityConfig, device: torch.device) -> Rows:
    """Rows of recipes whose exported text runs with hqsweep.compat in place of TransformerEngine."""
    for name, sections in RECIPES.items():
        recipe = parse_recipe({"name": name, **sections})
        recipes = recipe, imported(to_transformer_engine(recipe, name))
        modules = (_initialised(MODULES["TransformerLayer"](variant), config.seed).to(device) for variant in recipes)
        yield row("export", name, "TransformerLayer", named_pairs(*(_gradients(m, m, config.seed) for m in modules)))


def imported(exported: str) -> CustomRecipe:
    """Return the recipe of an exported module, with only the imports of TransformerEngine replaced."""
    names: dict[str, object] = {}
    text = re.sub(r"^from transformer_engine[\w.]* import", "from hqsweep.compat import", exported, flags=re.M)
    exec(compile(text, "exported.py", "exec"), names)
    return names["recipe"]


def _initialised(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return module


def _gradients(
    module: nn.Module, function: Callable[[Tensor], Tensor], seed: int, *, kernels: bool = True
) -> dict[str, Tensor]:
    """y and all gradients of a function that uses the module's parameters."""
    device = next(module.parameters()).device
    x = draw("normal", BATCH * CONTEXT, DIM, seed).view(BATCH, CONTEXT, DIM).to(device).requires_grad_()
    module.zero_grad()
    with quantization(kernels=kernels):
        y = function(x)
    y.backward(draw("normal", BATCH * CONTEXT, y.shape[-1], seed + 1).view(y.shape).to(device, y.dtype))
    return {"y": y.detach(), "dx": x.grad} | {f"d{name}": p.grad for name, p in module.named_parameters()}


MODULE_CHECKS: dict[str, Check] = {
    "modules": modules_check,
    "switch": switch_check,
    "export": export_check,
}


TOKENS, WIDTH, OUTPUTS = 64, 128, 96
GROWTH = 3.0
"""The ratio of largest magnitudes: the new last token over all tokens before.

It is no power of two, which would shift scales and hide the leak.
"""
KEY = RngKey(seed=1, slot="causality", step=3)


def causality_check(config: ParityConfig, device: torch.device) -> Rows:
    """Rows of each format on the input of a Linear: how a later token changes codes and outputs of earlier tokens."""
    before = draw("heavy", TOKENS, WIDTH, config.seed).clamp(-1e3, 1e3).to(device)
    after = before.clone()
    after[-1] = GROWTH * before.abs().max()
    for text in config.parity.formats:
        format = parse(text).rowwise_form
        expected, actual = (_earlier(format, x, config.seed) for x in (before, after))
        for case in expected:
            yield _verdict(text, case, shares_scales(format), expected[case], actual[case])


def shares_scales(format: Format) -> bool:
    """Return whether a scale of the format covers elements of more than one row."""
    return any(buffer.rows != 1 for buffer in format.layout.values())


def _earlier(format: Format, x: Tensor, seed: int) -> dict[str, Tensor]:
    """The results of all tokens except the last: the operand's values, and y of a Linear with a bf16 weight."""
    operand = HybridQuantizer(format, parse("bf16")).quantize(x, columnwise=None, key=KEY).rowwise
    quantizers = {"input": f"{format}|bf16", "weight": "bf16", "grad_output": "bf16"}
    module = Linear(WIDTH, OUTPUTS, name="causality", recipe=quantizers)
    module = module.to(x.device)
    with torch.no_grad():
        module.weight.copy_(draw("normal", OUTPUTS, WIDTH, seed))
        return {"operand": operand.dequantize()[:-1], "outputs of a Linear": module(x)[:-1]}


def _verdict(subject: str, case: str, leaks: bool, expected: Tensor, actual: Tensor) -> dict[str, object]:
    """A row of compared bytes. For a format that must leak, PASS where bytes differ, with their number and size."""
    compared = row("causality", subject, case, named_pairs({"earlier tokens": expected}, {"earlier tokens": actual}))
    if not leaks:
        return compared | {"note": "expected: no leak, each row has its own scales"}
    changed, total = compared["mismatches"], compared["total"]
    error = output_error(expected.float(), actual.float())["rel_l2"]
    note = f"expected: leak, rows share scales; {100 * changed / total:.1f} % of values change, relative L2 {error:.1e}"
    status = "PASS" if changed else "FAIL"
    return row("causality", subject, case, {}) | {"status": status, "total": total, "note": note}


CAUSALITY_CHECKS: dict[str, Check] = {"causality": causality_check}
