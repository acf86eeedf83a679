"""Projected weights: MXFP4's grid by TransformerEngine's rule, hosts that encode it exactly, gradients, statistics.

The rule of TransformerEngine's pull request 3264, for blocks of 32 along a row: the scale is
2^clamp(ceil(log2(amax / 6)), -126, 125), and RNE onto E2M1 makes codes. Here in float64, with ml_dtypes' E2M1.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import Linear, quantization, quantized_model_init
from hqsweep.nn.core.probe import Probe
from hqsweep.ops.stats import exact_tiles
from hqsweep.quant import HybridQuantizedTensor, HybridQuantizer
from hqsweep.quant.hybrid import ProjectedQuantizer
from hqsweep.quant.serialize import load_safetensors, save_safetensors
from hqsweep.recipe import LinearQuantizers, Recipe

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
MX_ON_MX = HybridQuantizer.parse("project(mxfp4) > mxfp8")
TILES = HybridQuantizer.parse("project(mxfp4) > fp8_block+2d")


def by_rule(x: torch.Tensor) -> torch.Tensor:
    """MXFP4's values of x [rows, cols] by the rule."""
    blocks = x.double().cpu().numpy().reshape(x.shape[0], -1, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    mantissa, exponent = np.frexp(amax / 6)
    scale = np.exp2(np.clip(exponent - (mantissa == 0.5), -126, 125).astype(np.float64))
    codes = np.clip(blocks / scale, -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    return torch.from_numpy((codes.astype(np.float64) * scale).reshape(x.shape))


def weights(rows: int = 256, cols: int = 256, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A weight with a block of zeros, negative zeros, an outlier, and blocks whose amax is 6 times a power of two."""
    x = (draw("normal", rows, cols) * 0.02).to(dtype)
    x[0, :32], x[1, :32], x[2, 40] = 0.0, -0.0, 10.0
    x[3, 32:64] = torch.linspace(-6, 6, 32).to(dtype) * 2.0**-9
    x[4, 0], x[5, 0] = 6 * 2.0**-7, float(np.nextafter(np.float32(6), np.float32(7))) * 2.0**-7
    return x


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_grid_is_transformer_engines(dtype, device):
    x = weights(dtype=dtype)
    values = MX_ON_MX.project(x.to(device)).cpu()
    assert values.dtype is dtype and torch.equal(values.double(), by_rule(x))
    assert torch.equal(MX_ON_MX.project(values), values), "a projected weight is its own projection"
    assert not torch.equal(values, x)


def test_a_block_by_hand():
    """amax 0.7 needs the scale 2^-3: 5.6 rounds to 6, 0.3 = 2.4 / 8 to 2 / 8, and 0.25 / 8 ties to 0."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([0.7, 0.3, -0.0625, 0.03125])
    assert MX_ON_MX.project(x)[0, :4].tolist() == [0.75, 0.25, -0.0625, 0.0]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("text", [
    "project(mxfp4) > mxfp8", "project(mxfp6_e2m3) > mxfp8", "project(mxfp6_e3m2) > mxfp8", "project(nvfp4) > mxfp8",
    "project(mxfp4+floor) > fp8_block", "project(mxfp4) > fp8_block+2d|mxfp8", "project(nvfp4+2d) > fp8_block+2d",
    "project(mxfp4) > mxfp8@rowwise_dequantized",
])  # fmt: skip
def test_the_operands_are_the_hosts_of_the_decoded_grid(text, device):
    x, quantizer = weights().to(device), HybridQuantizer.parse(text)
    grid = HybridQuantizer(quantizer.projection, quantizer.projection)
    values = grid.quantize(x).rowwise.dequantize()
    host = HybridQuantizer(quantizer.rowwise, quantizer.columnwise, quantizer.columnwise_source)
    got, expected = quantizer.quantize(x), host.quantize(values)
    for direction in ("rowwise", "columnwise"):
        ours, theirs = getattr(got, direction), getattr(expected, direction)
        assert all(torch.equal(ours.buffers[name], buffer) for name, buffer in theirs.buffers.items())
    plain = host.quantize(x).rowwise
    assert not all(torch.equal(plain.buffers[n], b) for n, b in got.rowwise.buffers.items())


def test_texts_and_mappings_are_read_back():
    for text in ("project(mxfp4) > mxfp8", "project(nvfp4+2d) > fp8_block+2d|mxfp8@rowwise_dequantized"):
        quantizer = HybridQuantizer.parse(text)
        assert isinstance(quantizer, ProjectedQuantizer) and str(quantizer) == text
        assert HybridQuantizer.parse(str(quantizer)) == HybridQuantizer.parse(quantizer) == quantizer
    assert HybridQuantizer.parse({"rowwise": "mxfp8", "columnwise": "mxfp8", "project": "mxfp4"}) == MX_ON_MX
    assert HybridQuantizer.parse("mxfp8") == HybridQuantizer.parse("mxfp8") != MX_ON_MX
    with pytest.raises(UserError, match=r"project\(mxfp4\) > nvfp4: a host is mxfp8 or fp8_block"):
        HybridQuantizer.parse("project(mxfp4) > mxfp8|nvfp4")


def test_other_tensors_take_no_projection():
    plain = HybridQuantizer.parse("mxfp8")
    with pytest.raises(
        UserError, match=r"^input: project\(mxfp4\) > mxfp8: a projection is for the weight of a linear"
    ):
        LinearQuantizers(input=MX_ON_MX, weight=plain, grad_output=plain)
    for part in ("dpa", "embedding", "norm"):
        with pytest.raises(UserError, match=rf"recipe\.{part}.*a projection is for the weight"):
            Recipe.from_config({"linear": "mxfp8", part: str(MX_ON_MX)})


def test_mxfp8_encodes_every_block_of_a_row_exactly():
    x = weights()
    sums = MX_ON_MX.sums(x)
    assert sums["rowwise"].row()["exact_tiles_pct"] == 100 and sums["rowwise"].exact == (2048, 2048)
    assert torch.equal(MX_ON_MX.quantize(x).rowwise.dequantize(), MX_ON_MX.project(x))


@pytest.mark.parametrize(("spread", "exact"), [(2.0**14, 1), (2.0**15, 0)])
def test_a_tile_is_exact_up_to_a_spread_of_2_to_the_14(spread, exact):
    """By hand. The large block has the scale 2^8 and a 6, so 1536: the tile's scale is 4, as 1536 / 448 = 3.4, and the
    least number of E4M3 stands for 2^-7. The least number of the small block is half its scale."""
    x = torch.zeros(128, 128)
    x[0, 0], x[1, 32], x[1, 33] = 6 * 2.0**8, 6 * 2.0**8 / spread, 0.5 * 2.0**8 / spread
    values = TILES.project(x)
    assert torch.equal(values, x)
    assert exact_tiles(values, TILES.rowwise, TILES.quantize(x).rowwise.buffers) == (exact, 1)
    assert TILES.sums(x)["rowwise"].exact == TILES.sums(x)["columnwise"].exact == (exact, 1)


def test_errors_are_those_of_projection_and_host_together():
    x = weights()
    for direction, sums in MX_ON_MX.sums(x).items():
        operand = getattr(MX_ON_MX.quantize(x), direction)
        decoded = operand.dequantize(torch.float64)
        error = ((x if direction == "rowwise" else x.t()).double() - decoded).norm() / x.double().norm()
        assert sums.row()["rel_l2"] == pytest.approx(error.item(), rel=1e-5) and error > 0.05


def step(linear: nn.Module, x: torch.Tensor, dy: torch.Tensor):
    x = x.clone().requires_grad_()
    y = linear(x)
    y.backward(dy)
    return y.detach(), x.grad, linear.weight.grad


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_linear_computes_with_projected_weights_and_its_gradient_passes_straight_through(device):
    """It equals a linear of the host alone whose weight is the projected one, gradients included."""
    texts = {"input": "mxfp8", "weight": "project(mxfp4) > mxfp8", "grad_output": "mxfp8"}
    x, dy = draw("normal", 64, 256).bfloat16().to(device), draw("normal", 64, 256, 1).bfloat16().to(device)
    ours = Linear(256, 256, name="fc", recipe=texts).to(device)
    theirs = Linear(256, 256, name="fc", recipe="mxfp8").to(device)
    with torch.no_grad():
        ours.weight.copy_(weights().float())
        theirs.weight.copy_(by_rule(weights()).float())
    assert all(map(torch.equal, step(ours, x, dy), step(theirs, x, dy)))
    assert not torch.equal(ours.weight, theirs.weight)


def test_held_weights_are_projected_and_keep_their_text(tmp_path):
    texts = {"input": "mxfp8", "weight": "project(mxfp4) > mxfp8", "grad_output": "mxfp8"}
    torch.manual_seed(0)
    plain = Linear(64, 96, name="fc", recipe=texts)
    torch.manual_seed(0)
    with quantized_model_init():
        held = Linear(64, 96, name="fc", recipe=texts)
    assert isinstance(held.weight, HybridQuantizedTensor)
    assert torch.equal(held.weight.dequantize(), MX_ON_MX.project(plain.weight.detach().bfloat16()).float())
    save_safetensors(held.state_dict(), tmp_path / "w.safetensors")
    read = load_safetensors(tmp_path / "w.safetensors")["weight"]
    assert read.quantizer == MX_ON_MX and torch.equal(read.dequantize(), held.weight.dequantize())


def test_a_probe_has_the_share_of_exact_tiles():
    probe = Probe(step=1)
    texts = {"input": "mxfp8", "weight": "project(mxfp4) > mxfp8", "grad_output": "mxfp8"}
    linear, (x, dy) = Linear(256, 256, name="fc", recipe=texts), (draw("normal", 64, 256).bfloat16() for _ in range(2))
    with torch.no_grad():
        linear.weight[0] *= 2.0**-16  # which no block of a column holds beside the others
    with quantization(step=1, probe=probe):
        step(linear, x, dy)
    shares = {(row["tensor"], row["direction"]): row["exact_tiles_pct"] for row in probe.rows}
    assert shares["weight", "rowwise"] == 100 and 87.5 <= shares["weight", "columnwise"] < 95
    assert {share for (tensor, _), share in shares.items() if tensor != "weight"} == {None}
