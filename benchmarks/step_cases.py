"""The table of benchmarks/step.py: sizes, recipes, the share of compiled torch that each must reach, and the config of
our Trainer in each case."""

from benchmarks.step_floors import Size
from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.model import ModelConfig
from hqsweep.recipe.base import AnyRecipe
from hqsweep.sweep.grid.compose import load_recipe

SIZES = {
    "S": Size(model=ModelConfig(dim=384, layers=6, heads=6), batch=128, context=256, vocabulary=256, turn=20),
    "M": Size(model=ModelConfig(dim=768, layers=12, heads=12), batch=32, context=1024, vocabulary=50304, turn=8),
    "L": Size(model=ModelConfig(dim=2048, layers=8, heads=16), batch=8, context=2048, vocabulary=50304, turn=6),
    "moe": Size(
        model=ModelConfig(dim=512, layers=10, heads=8, experts=8), batch=64, context=512, vocabulary=256, turn=8
    ),
}
RECIPES = (
    "bf16", "mxfp8", "float8_block_scaling", "nvfp4_fwd_mxfp8_bwd_original", "nvfp4_fwd_mxfp8_bwd_dequantized",
    "nvfp4", "current_scaling:native", "float8_block_scaling:native", "fp8_row:native", "fp8_row_gw_hp:native",
)  # fmt: skip
_GOALS = {
    "bf16": (0.90, 1.00, 1.00),
    **dict.fromkeys(("mxfp8", "float8_block_scaling"), (0.80, 0.95, 0.92)),
    **dict.fromkeys(("nvfp4_fwd_mxfp8_bwd_original", "nvfp4_fwd_mxfp8_bwd_dequantized"), (0.70, 0.88, 0.88)),
    "nvfp4": (0.62, 0.82, 0.82),
    **dict.fromkeys(("current_scaling:native", "float8_block_scaling:native"), (0.80, 1.05, 1.20)),
    "fp8_row:native": (0.80, 1.10, 1.25),
}
GOALS = {(size, name): goal for name, goals in _GOALS.items() for size, goal in zip("SML", goals, strict=True)}
GOALS["moe", "mxfp8"] = 0.85
"""Size and recipe -> the share of compiled torch's tokens a second that is wanted of train.compile=auto."""
REFERENCES = ("compiled", "eager", "rowwise")
"""Plain torch in bf16, compiled or not, and compiled with FP8 rows as torchao's recipe has them."""
MODES = ("auto", "graph", "off")
ENDLESS = 10**6
"""The steps of a training whose end no case reaches."""


def training(size: Size, recipe: str, mode: str, device: str) -> ConvergenceConfig:
    """The config of our Trainer."""
    train = {"steps": ENDLESS, "batch": size.batch, "context": size.context, "device": device, "compile": mode}
    train |= {"log_every": ENDLESS, "eval_every": ENDLESS, "checkpoint_every": ENDLESS}
    name, _, gemm = recipe.partition(":")
    sections = dict(load_recipe(name)) | ({"gemm": gemm} if gemm else {})
    return ConvergenceConfig.model_validate(
        {"job": "convergence", "sweep": "step", "recipe": sections, "model": size.model, "train": train}
        | {"data": {"source": "markov"}, "stats": {"every": 0}}
    )


def build_recipe(name: str) -> AnyRecipe:
    """The recipe of a name, for what depends on no size."""
    return training(next(iter(SIZES.values())), name, MODES[0], "cpu").recipe.build()
