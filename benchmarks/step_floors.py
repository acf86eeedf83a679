"""The least that a training step of a GPT has to do: FLOPs of products, and bytes of all other work.

Each part reads what it needs once and writes its result once, with a float32 residual stream, all else bfloat16 and
float32 masters. Bytes a token, for width D, F of SwiGLU and V of the vocabulary, forward and backward:
  norm        with the residual add before it 12 D (sum 4, branch 2 in; sum 4, h 2 out) and 16 D (dh 2, sum 4, dsum 4
              in; dx 4, dbranch 2 out); two in a layer, and the last
  positions   8 D (q and k in and out) and 12 D (dq, dk, dv in, one gradient out)
  activation  6 F (gate and up in, one out) and 10 F (two and their gradient in, two out)
  experts     for k of them 2 D + 2 kD (dispatch), 2 kD + 2 D (combine), then 2 kD + 2 D and 2 D + 4 kD
  loss        4 V: logits in, their gradient out
  embedding   8 D, forward and backward
and a parameter, in the optimizer: 32 (gradient for its norm; parameter, moments and gradient in, three out).
  quantize    an element, with gemm=exact: x 2 in, 2 for fprop, codes, then codes in and 2 for wgrad; dy 2 in, 4 out;
              w 4 in, 4 out; 2 (of w 4) more in for formats that find an amax first; in bf16 the cast of w alone
What is fused, norm or activation with quantize, neither writes nor reads its bfloat16 result, where no amax is to be
found first: that is fused_floor_ms. Attention does 3.5 times the FLOPs of its forward, since backward forms the
products of forward again. Linears take what their products take alone, by torch and in bfloat16, at their shapes, which
can be less than at the shape whose speed stands for the others. gemm=native multiplies codes, at the speed of FP8
products, and decodes nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.rows import Row
from hqsweep.config.job import grouped_shapes, linear_shapes
from hqsweep.config.model import ModelConfig, expert_width, ffn_width, has_experts
from hqsweep.formats import Format
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe import Recipe
from hqsweep.recipe.argument import module_quantizers
from hqsweep.recipe.sections import LinearQuantizers

OPTIMIZER_BYTES = 32
FUSED = {"qkv": (True, False), "fc1": (True, True), "fc2": (True, False)}
"""Linear -> whether a norm or an activation makes its input, and an activation's backward its dy."""
FLASH_FLOPS = 3.5
"""The FLOPs of attention, forward and backward, over those of forward."""


class Product(NamedTuple):
    """A linear, or the experts of a layer together: x [rows, k] by weights [n, k] of each expert."""

    kind: str
    """The module type."""
    name: str
    rows: int
    k: int
    n: int
    experts: int

    @property
    def weights(self) -> int:
        return self.k * self.n * self.experts

    @property
    def flop(self) -> float:
        """The FLOPs of its three products."""
        return 6.0 * self.rows * self.k * self.n


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and its batch."""

    model: ModelConfig
    batch: int
    context: int
    vocabulary: int
    turn: int
    """The number of steps in a turn."""

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    def products(self) -> Iterator[Product]:
        """The product of every linear."""
        for name, k, n in linear_shapes(self.model, self.vocabulary):
            yield Product("linear", name, self.tokens, k, n, 1)
        for name, k, n in grouped_shapes(self.model):
            yield Product("grouped_linear", name, self.tokens * self.model.top_k, k, n, self.model.experts)

    def parameters(self) -> int:
        """The number of parameters of linears, embedding, norms and routers."""
        model = self.model
        mixed = sum(has_experts(model, i) for i in range(model.layers))
        others = self.vocabulary + 2 * model.layers + 1 + mixed * model.experts
        return sum(p.weights for p in self.products()) + others * model.dim

    def linear_flop(self) -> float:
        return sum(p.flop for p in self.products())

    def attention_flop(self) -> float:
        """The FLOPs of the forward of its causal core."""
        return 2.0 * self.tokens * self.context * self.model.dim * self.model.layers

    def flop(self) -> float:
        """The FLOPs of forward and backward, by which models are compared: nothing is counted twice."""
        return self.linear_flop() + 3 * self.attention_flop()


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The best rates of the device, measured in the same run."""

    copy_gbs: float
    """The bytes read and written by a copy, in 1e9 a second."""
    matmul_tflops: float
    """The rate of bfloat16 products."""
    fp8_tflops: float

    def ms(self, nbytes: float, flop: float = 0.0) -> float:
        return nbytes / self.copy_gbs * 1e-6 + flop / self.matmul_tflops * 1e-9


def elementwise_bytes(size: Size) -> dict[str, float]:
    """Part -> bytes of a step."""
    model, tokens = size.model, size.tokens
    dim, mixed = model.dim, sum(has_experts(model, i) for i in range(model.layers))
    hidden = ffn_width(model) * (model.layers - mixed)
    hidden += expert_width(model) * mixed * (model.top_k + model.shared_expert)
    parts = {"norm": 28 * dim * (2 * model.layers + 1), "positions": 20 * dim * model.layers}
    parts |= {"activation": 16 * hidden, "experts": (8 + 10 * model.top_k) * dim * mixed}
    parts |= {"loss": 4 * size.vocabulary, "embedding": 8 * dim}
    return {name: float(nbytes * tokens) for name, nbytes in parts.items() if nbytes}


def quantize_bytes(size: Size, recipe: Recipe) -> tuple[float, float]:
    """The bytes of all quantizations of a step, and how many of all bytes fused passes save."""
    total, saved = 0.0, 0.0
    for product in size.products():
        section, _ = module_quantizers(recipe, product.kind, product.name)
        total += _linear_bytes(section, product, exact=recipe.gemm != "native")
        before, after = FUSED.get(product.name.rsplit(".")[-1], (False, False))
        saved += 4.0 * product.rows * product.k * (before and _fusable(section.input))
        saved += 4.0 * product.rows * product.n * (after and _fusable(section.grad_output))
    return total, saved


def _fusable(quantizer: HybridQuantizer) -> bool:
    formats = quantizer.rowwise, quantizer.columnwise
    return not any(f.high_precision or _reads(f) > 1 for f in formats)


def _reads(format: Format) -> int:
    """The passes over the tensor: one more finds its amax."""
    return 2 if format.amax_name and not format.delayed else 1


def _linear_bytes(section: LinearQuantizers, product: Product, *, exact: bool) -> float:
    """The bytes to quantize x, the weights and dy."""
    rows, k, n = product.rows, product.k, product.n
    per_element = _element_bytes(section.input, (rows, k), exact), _element_bytes(section.grad_output, (rows, n), exact)
    saved = section.input.columnwise
    again = 2 * saved.bits_per_element(rows, k) / 8 if exact and not saved.high_precision else 0.0  # codes out and in
    of_weight = _element_bytes(section.weight, (n, k), exact, source=4)
    return (per_element[0] + again) * rows * k + per_element[1] * rows * n + of_weight * product.weights


def _element_bytes(quantizer: HybridQuantizer, shape: tuple[int, int], exact: bool, source: int = 2) -> float:
    """The bytes read and written for each element of a tensor with `source` bytes an element."""
    low = [f for f in (quantizer.rowwise, quantizer.columnwise) if not f.high_precision]
    if not low:
        return source + 2.0 if source == 4 else 0.0  # a master is cast
    written = sum(2.0 if exact else f.bits_per_element(*shape) / 8 for f in low)
    return source * max(map(_reads, low)) + written


def native_flop(size: Size, recipe: Recipe) -> float:
    """The FLOPs of the linears whose products are of codes."""
    if recipe.gemm != "native":
        return 0.0
    quantized = (not module_quantizers(recipe, p.kind, p.name)[0].input.rowwise.high_precision for p in size.products())
    return sum(p.flop for p, native in zip(size.products(), quantized, strict=True) if native)


def floor_rows(size: Size, rates: Rates, linears_ms: float, recipes: dict[str, Recipe]) -> Iterator[Row]:
    """A row for each part, then for each recipe: its quantization, and the whole step. linears_ms: the time of their
    products alone."""
    parts = {"attention": (0.0, FLASH_FLOPS * size.attention_flop())}
    parts |= {name: (nbytes, 0.0) for name, nbytes in elementwise_bytes(size).items()}
    parts["optimizer"] = (float(OPTIMIZER_BYTES * size.parameters()), 0.0)
    yield {"case": "linears", "tflop": size.linear_flop() * 1e-12, "floor_ms": linears_ms}
    for name, (nbytes, flop) in parts.items():
        yield {"case": name, "gbytes": nbytes * 1e-9, "tflop": flop * 1e-12, "floor_ms": rates.ms(nbytes, flop)}
    shared = linears_ms + sum(rates.ms(*part) for part in parts.values())
    plain = shared + rates.ms(quantize_bytes(size, Recipe.from_config({"linear": "bf16"}))[0])
    for name, recipe in recipes.items():
        nbytes, saved = quantize_bytes(size, recipe)
        quantize = rates.ms(nbytes)
        yield {"case": "quantize", "recipe": name, "gbytes": nbytes * 1e-9, "floor_ms": quantize}
        native = linears_ms * native_flop(size, recipe) / size.linear_flop()
        whole = shared + quantize - native * (1 - rates.matmul_tflops / rates.fp8_tflops)
        fused = whole - rates.ms(saved)
        row = {"floor_ms": whole, "fused_floor_ms": fused, "share": plain / fused}
        yield {"case": "whole step", "recipe": name} | row
