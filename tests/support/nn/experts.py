"""Grouped linears beside the single ones that their experts are: an oracle for their tests."""

import torch
from cases import LINEARS, PRODUCTS

from hqsweep.formats.inputs import draw
from hqsweep.nn import GroupedLinear, GroupedLinearOptions, Linear, LinearOptions, quantization, quantized_model_init
from hqsweep.ops.splits import Splits
from hqsweep.recipe import LinearQuantizers, Recipe

SPLITS = (48, 0, 16, 64)
GPU = (9, 0)
"""A compute capability that has a kernel for every plan; torch has them for a CPU, too."""
EXPERTS, ROWS, K, N = len(SPLITS), sum(SPLITS), 48, 32
FORMATS = list(PRODUCTS)
SECTIONS = [
    LINEARS["nvfp4"],
    {"input": "nvfp4+row_scaled|mxfp8@rowwise_dequantized", "weight": "nvfp4|mxfp8@rowwise_dequantized",
     "grad_output": "mxfp8"},
    {"input": "fp8_delayed|mxfp8", "weight": "fp8_delayed", "grad_output": "fp8_delayed+e5m2|mxfp8"},
    {"input": "mxfp8|bf16", "weight": "nvfp4+sr|fp8_block+2d", "grad_output": "nvfp4+4over6|bf16"},
]  # fmt: skip
"""Sections whose tensors differ in format: a transform with random bits, amaxes of rows, histories, high precision."""


def hidden(splits=SPLITS):
    """Splits as a device has them."""
    return Splits(rows=sum(splits), count=len(splits), sizes=None, device_sizes=torch.tensor(splits, dtype=torch.int32))


class Expert(Linear):
    """A Linear that draws the random bits of one expert."""

    module_type = "grouped_linear"
    expert = 0


def recipe_of(quantizers, **options):
    sections = {"linear": "bf16", "grouped_linear": quantizers}
    return Recipe(**{name: LinearQuantizers.parse(section, "test") for name, section in sections.items()}, **options)


def grouped(quantizers="mxfp8", gemm="exact", dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    recipe, options = recipe_of(quantizers, gemm=gemm), GroupedLinearOptions(**options)
    module = GroupedLinear(EXPERTS, K, N, name="experts", recipe=recipe, dtype=dtype, options=options)
    for bias in module.biases:
        torch.nn.init.normal_(bias)
    return module


def held(quantizers, preserve=False, **options):
    """The same with weights that are held quantized."""
    with quantized_model_init(preserve_high_precision_init_val=preserve), quantization(seed=1, step=0):
        return grouped(quantizers, **options)


def singles(module, **options):
    """A Linear for each expert, with the weights and quantizers of a grouped one."""
    linears, options = [], LinearOptions(fuse_wgrad_accumulation=module.fuse_wgrad_accumulation, **options)
    biases = [row for bias in module.biases for row in (bias if bias.dim() == 2 else [bias])]
    for expert, weight in enumerate(module.expert_weights()):
        shared = {"name": "experts", "recipe": module.quantizers, "dtype": module.dtype, "options": options}
        linear = Expert(K, N, bias=bool(biases), **shared)
        linear.expert = expert
        with torch.no_grad():
            linear.weight.copy_(weight)
            if biases:
                linear.bias.copy_(biases[expert])
        linears.append(linear)
    return linears


def train(module, linears, splits=SPLITS, steps=2, context=lambda step: quantization(seed=1, step=step), call=None):
    """Outputs and gradients of both after some steps, which must be equal."""
    call, total = call or (lambda m, *args: m(*args)), sum(splits)
    for step in range(1, steps + 1):
        x, dy = draw("heavy", total, K, step).clamp(-50, 50).to(module.dtype), draw("normal", total, N, step)
        x, alone = x.clone().requires_grad_(), [part.clone().requires_grad_() for part in x.split(splits)]
        with context(step):
            y = call(module, x, list(splits))
            y.backward(dy.to(y.dtype))
        for linear, part, own, gradient in zip(linears, alone, y.split(splits), dy.split(splits), strict=True):
            with context(step):
                out = call(linear, part)
                out.backward(gradient.to(out.dtype))
            assert torch.equal(out, own)
        assert torch.equal(x.grad, torch.cat([part.grad for part in alone]))
    return gradients(module), [gradients(linear) for linear in linears]


def gradients(module):
    """Gradients of the parameters, by name; a main_grad where there is one."""
    return {name: getattr(p, "main_grad", p.grad) for name, p in module.named_parameters()}


def assert_same_gradients(ours, theirs):
    for expert, own in enumerate(theirs):
        for name, expected in own.items():
            got = ours[name][expert] if name in ours else ours[f"{name}{expert}"]
            assert torch.equal(got, expected), (name, expert)


def ids(value):
    return value if isinstance(value, str) else " ".join(value.values())
