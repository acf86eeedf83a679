"""Linear against what stands outside of it: golden bytes, and torch._scaled_mm on TransformerEngine's layouts.

The operands of the second part are built here with torch's casts alone. Blocks of 1x128 have their scale_inv as
[blocks, rows] and tiles of 128x128 as [rows / 128, blocks], both float32 ("GEMM ready", and unpadded here).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from cases import crossed
from support.golden.golden_cases import (
    COMMITTED,
    QUANTIZER_CASES,
    Arrays,
    as_matrix,
    check_encoded,
    directions,
    format_of,
)
from support.golden.golden_cases import golden_buffers as buffers_of
from torch import Tensor

from hqsweep.formats import ExactOperand, Identity, parse
from hqsweep.formats.inputs import draw
from hqsweep.gemm import native
from hqsweep.gemm.exact import mm_t
from hqsweep.gemm.native import mm_t_native
from hqsweep.nn import Linear
from hqsweep.nn.core import call
from hqsweep.quant import HybridQuantizer, Operand
from hqsweep.recipe import LinearQuantizers

READS = {
    ("input", "rowwise"): ("fprop", 0), ("weight", "rowwise"): ("fprop", 1),
    ("grad_output", "rowwise"): ("dgrad", 0), ("weight", "columnwise"): ("dgrad", 1),
    ("grad_output", "columnwise"): ("wgrad", 0), ("input", "columnwise"): ("wgrad", 1),
}  # fmt: skip
"""(tensor, direction) -> the GEMM that reads it, as its first or second operand."""
SLOTS = ("input", "weight", "grad_output")


def train(quantizers: dict, tensors: dict[str, Tensor], gemm: str, product: Callable = mm_t) -> tuple[dict, dict]:
    """(y, dx and dw; GEMM -> its two operands) of one Linear; `product` stands for the one of gemm=native."""
    x, w, dy = (tensors[slot] for slot in SLOTS)
    module = Linear(x.shape[1], w.shape[0], name="layer", recipe="fp32", dtype=x.dtype).to(x.device)
    module.quantizers = LinearQuantizers.parse(quantizers, "test")  # unchecked: a transform of one operand alone, too
    module.gemm, pairs = gemm, []
    with torch.no_grad():
        module.weight.copy_(w)

    def spy(real, a, b, **options):
        pairs.append((a, b))
        return real(a, b, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, "mm_t", partial(spy, mm_t))
        patch.setattr(native, "mm_t_native", partial(spy, product))
        x = x.clone().requires_grad_()
        y = module(x)
        y.backward(dy)
    gemms = dict(zip(("fprop", "dgrad", "wgrad"), pairs, strict=True))
    return {"fprop": y.detach(), "dgrad": x.grad, "wgrad": module.weight.grad}, gemms


def with_matrix(slot: str, matrix: Tensor) -> dict[str, Tensor]:
    """Tensors of a linear with the matrix in one slot."""
    rows, cols = matrix.shape
    shapes = {
        "input": {"input": (rows, cols), "weight": (32, cols), "grad_output": (rows, 32)},
        "weight": {"input": (32, cols), "weight": (rows, cols), "grad_output": (32, rows)},
        "grad_output": {"input": (rows, 32), "weight": (cols, 32), "grad_output": (rows, cols)},
    }[slot]
    return {name: draw("normal", *shape).to(matrix.dtype) for name, shape in shapes.items()} | {slot: matrix}


def received(slot: str, matrix: Tensor, formats: dict, gemm: str) -> dict[str, Operand | ExactOperand]:
    """Direction -> the operand that a GEMM receives for the matrix, with these formats in the slot alone."""
    high = "bf16" if matrix.dtype == torch.bfloat16 else "fp32"
    both = [formats.get(direction, Identity(name=high)) for direction in ("rowwise", "columnwise")]
    quantizers = dict.fromkeys(SLOTS, high) | {slot: HybridQuantizer(*both)}
    _, gemms = train(quantizers, with_matrix(slot, matrix), gemm)
    places = {direction: READS[slot, direction] for direction in formats}
    return {direction: gemms[name][index] for direction, (name, index) in places.items()}


def read_directions(case: dict) -> list[str]:
    """Directions of a case that a recipe can ask for."""
    row_scaled = case.get("mode") == "row_scaled"
    return ["rowwise"] if row_scaled else directions(Arrays(case))


def one_of_each() -> list[dict]:
    """One golden case for every pair of formats and dtype of the input."""
    rows = {}
    for case in QUANTIZER_CASES:
        names = tuple(str(format_of(case, direction)) for direction in read_directions(case))
        rows.setdefault((names, as_matrix(Arrays(case).raw(case["input_key"])).dtype), case)
    return list(rows.values())


GOLDEN = one_of_each()


@pytest.mark.feature("F58")
@pytest.mark.parametrize(
    ("case", "slot"),
    crossed(GOLDEN, SLOTS, whole=GOLDEN[::9]),
    ids=lambda value: value if value in SLOTS else value["id"],
)
def test_gemms_receive_golden_bytes(case, slot):
    arrays = Arrays(case)
    x = as_matrix(arrays.raw(case["input_key"]))
    formats = {direction: format_of(case, direction) for direction in read_directions(case)}
    codes, exact = (received(slot, x, formats, gemm) for gemm in ("native", "exact"))
    for direction, format in formats.items():
        shape = tuple(x.shape) if direction == "rowwise" else tuple(x.shape)[::-1]
        golden = buffers_of(case, arrays, direction, format, *shape)
        check_encoded(case, arrays, direction, codes[direction].buffers, golden)
        assert_exact(exact[direction], Operand(format=format, shape=shape, dtype=x.dtype, buffers=golden))


def test_golden_cases_are_of_every_family():
    families = {str(format_of(case, "rowwise")).split("+")[0] for case in GOLDEN}
    assert families == {"fp8_current", "fp8_block", "mxfp8", "nvfp4"} and len(GOLDEN) > 30


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("text", ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8+floor", "mxfp8+e5m2+even"])
def test_gemms_receive_torchaos_bytes(text, slot):
    """Rows of one block; where torchao departs from the rules (tests/formats/test_mx_scales.py) they are left out."""
    file, format = np.load(COMMITTED / "torchao_mx.npz"), parse(text)
    x = torch.from_numpy(file["bf16/input"]).view(torch.bfloat16)
    scale, data = (torch.from_numpy(file[f"bf16/{text}/rowwise_{name}"]) for name in ("scale", "data"))
    rows = ~x.isnan().any(1) & (scale[:, 0] != 0)
    golden = {"q": data[rows], "s": scale[rows]}
    buffers = received(slot, x[rows], {"rowwise": format}, "native")["rowwise"].buffers
    assert rows.sum() > 95 and all(torch.equal(buffers[name], golden[name]) for name in ("q", "s"))


def assert_exact(got: Operand | ExactOperand, golden: Operand) -> None:
    """The matrix and the factor that gemm=exact multiplies are those of the golden codes."""
    got, expected = got.operand() if isinstance(got, Operand) else got, golden.operand()
    assert torch.equal(got.matrix.float(), expected.matrix.float()) and got.divisor == expected.divisor
    assert (got.factor is None and expected.factor is None) or torch.equal(got.factor, expected.factor)


MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
RECIPES = {
    "fp8_current": {"input": "fp8_current", "weight": "fp8_current", "grad_output": "fp8_current+e5m2"},
    "fp8_block": {"input": "fp8_block", "weight": "fp8_block+2d", "grad_output": "fp8_block"},
    "hybrid": {"input": "fp8_current|fp8_block", "weight": "fp8_current|fp8_block+2d", "grad_output": "fp8_block"},
}
TOKENS, IN, OUT = 256, 512, 1024


@dataclass(frozen=True, kw_only=True)
class Theirs:
    """One operand [rows, k] in TransformerEngine's layout."""

    data: Tensor
    scale_inv: Tensor
    tile: tuple[int, int]
    """Rows and columns that share a scale; (0, 0): all of them."""

    @property
    def scales(self) -> Tensor:
        """[rows / tile rows, k / tile columns], as torch._scaled_mm has its first operand's."""
        return self.scale_inv.t() if self.tile == (1, 128) else self.scale_inv

    def values(self) -> Tensor:
        """float64 [rows, k]."""
        scales = self.scales.double()
        for axis, size in enumerate(self.tile if self.scales.dim() else ()):
            scales = scales.repeat_interleave(size, axis)
        return self.data.double() * scales


def theirs(text: str, matrix: Tensor) -> Theirs:
    """scale = max / amax, for blocks rounded down to a power of two; codes are x * scale; scale_inv = 1 / scale."""
    dtype = torch.float8_e5m2 if "e5m2" in text else torch.float8_e4m3fn
    x, (rows, k) = matrix.float(), matrix.shape
    largest = x.new_tensor(MAX[dtype])  # a tensor: torch takes number / tensor as number * (1 / tensor)
    if "block" not in text:
        scale = largest / x.abs().max()
        return Theirs(data=(x * scale).to(dtype), scale_inv=1 / scale, tile=(0, 0))
    high = 128 if "2d" in text else 1
    tiles = x.view(rows // high, high, k // 128, 128)
    scale = largest / tiles.abs().amax(dim=(1, 3), keepdim=True)
    scale = scale.view(torch.int32).bitwise_and(-(1 << 23)).view(torch.float32)  # without its mantissa
    scale_inv = (1 / scale).view(rows // high, k // 128)
    data = (tiles * scale).view(rows, k).to(dtype)
    return Theirs(data=data, scale_inv=scale_inv if high > 1 else scale_inv.t().contiguous(), tile=(high, 128))


def their_operands(recipe: str, tensors: dict[str, Tensor]) -> dict[str, list[Theirs]]:
    """GEMM -> its two operands."""
    operands = {gemm: [None, None] for gemm in ("fprop", "dgrad", "wgrad")}
    for (slot, direction), (gemm, index) in READS.items():
        quantizer, matrix = HybridQuantizer.parse(RECIPES[recipe][slot]), tensors[slot]
        if direction == "columnwise":
            matrix = matrix.t().contiguous()
        operands[gemm][index] = theirs(str(getattr(quantizer, direction)), matrix)
    return operands


def drawn(device: str) -> dict[str, Tensor]:
    shapes = {"input": (TOKENS, IN), "weight": (OUT, IN), "grad_output": (TOKENS, OUT)}
    kinds = {"input": "row_scaled", "weight": "normal", "grad_output": "normal"}
    return {slot: draw(kinds[slot], *shape, i).to(device) for i, (slot, shape) in enumerate(shapes.items())}


def assert_bytes(operand: Operand, expected: Theirs) -> None:
    assert torch.equal(operand.buffers["q"], expected.data.view(torch.uint8))
    assert torch.equal(operand.buffers["s"], expected.scales.view(operand.buffers["s"].shape))


@pytest.mark.feature("T33")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_exact_products_are_those_of_their_operands_up_to_float32_accumulation(recipe, device):
    tensors = drawn(device)
    outputs, gemms = train(RECIPES[recipe], tensors, "exact")
    for name, operands in their_operands(recipe, tensors).items():
        a, b = (each.values() for each in operands)
        for operand, values in zip(gemms[name], (a, b), strict=True):
            operand = operand.operand() if isinstance(operand, Operand) else operand
            factor = 1.0 if operand.factor is None else operand.factor.double()
            assert torch.equal(operand.matrix.double() * factor / operand.divisor, values)
        expected, accumulated = a @ b.t(), (a.shape[1] + 8) * 2.0**-23 * (a.abs() @ b.abs().t())
        rounded = (2.0**-8 if outputs[name].dtype == torch.bfloat16 else 0.0) * expected.abs()
        assert ((outputs[name].double() - expected).abs() <= accumulated + rounded).all(), name


@pytest.mark.feature("T8")
@pytest.mark.parametrize("recipe", RECIPES)
def test_native_products_receive_their_bytes(recipe):
    tensors = drawn("cpu")
    _, gemms = train(RECIPES[recipe], tensors, "native")
    for name, expected in their_operands(recipe, tensors).items():
        for operand, other in zip(gemms[name], expected, strict=True):
            assert_bytes(operand, other)


@pytest.mark.feature("F58", "T33")
@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_native_products_are_torchs_own_on_their_operands(recipe):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper has both formats")
    tensors = drawn("cuda")
    outputs, gemms = train(RECIPES[recipe], tensors, "native", mm_t_native)
    for name, (a, b) in their_operands(recipe, tensors).items():
        for operand, other in zip(gemms[name], (a, b), strict=True):
            assert_bytes(operand, other)
        scales = a.scales, b.scales.t() if b.scales.dim() else b.scales
        expected = torch._scaled_mm(a.data, b.data.t(), *scales, out_dtype=outputs[name].dtype)
        assert torch.equal(outputs[name], expected), name
