"""Checks of the parity job on whole modules: y, dx and the gradient of every parameter.

modules   Linear, LayerNormLinear, LayerNormMLP and TransformerLayer under every ordered pair of base formats, against
          their composition from format references (jobs/composed.py)
switch    a module whose recipe is changed after a step against a fresh one under the new recipe
export    a module under a recipe against the same under the TransformerEngine factory that the recipe is exported to
"""

import re
from collections.abc import Callable
from itertools import pairwise, product

import torch
from torch import Tensor, nn

from hqsweep.compat.export import to_transformer_engine
from hqsweep.config.job import ParityConfig
from hqsweep.formats import bases
from hqsweep.formats.inputs import draw
from hqsweep.jobs.parity.compare_bytes import Check, Rows, named_pairs, row
from hqsweep.jobs.parity.composed import composed
from hqsweep.nn import (
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MLPOptions,
    TransformerLayer,
    TransformerOptions,
    quantization,
    set_recipe,
)
from hqsweep.recipe.custom import CustomRecipe
from hqsweep.recipe.schedule import parse_recipe
from hqsweep.recipe.sectioned import Recipe

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
                actual = _gradients(module, module, config.seed, kernels=False)  # whose sums are in torch's order
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
    """Rows of recipes whose exported text is executed with hqsweep.compat in the place of TransformerEngine."""
    for name, sections in RECIPES.items():
        recipe = parse_recipe({"name": name, **sections})
        recipes = recipe, imported(to_transformer_engine(recipe, name))
        modules = (_initialised(MODULES["TransformerLayer"](variant), config.seed).to(device) for variant in recipes)
        yield row("export", name, "TransformerLayer", named_pairs(*(_gradients(m, m, config.seed) for m in modules)))


def imported(exported: str) -> CustomRecipe:
    """The recipe of an exported module. Its imports of TransformerEngine are replaced, and nothing else."""
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
    """y and all gradients of function, which uses the parameters of the module."""
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
