"""The compiled extension as torch operators: hqsweep::quantize, find_amax_, dequantize, and on CUDA scale_product.

The extension does not link to torch (one build serves every torch), so this is the only place where tensors become
addresses. Bytes equal the reference's; tests and the parity job hold that. Formats travel as their canonical text. Work
is enqueued on the current stream and nothing waits for it. Autograd is left to the modules.
"""

from functools import cache

import torch
from torch import Tensor
from torch.library import Library, register_fake

from hqsweep.formats import MX, NVFP4, Format, Fp8Block, Fp8Current, parse

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TILE = 128
"""Side of the tiles of X over which statistics are summed."""


@cache
def extension():
    """The compiled module hqsweep._C, or None when it was not built."""
    try:
        from hqsweep import _C
    except ImportError:
        return None
    return _C


@cache
def spec_fields(format: Format) -> dict[str, object] | None:
    """Keyword arguments of _C.Spec for a format, or None for one without a kernel (Identity)."""
    match format:
        case Fp8Current() | Fp8Block():
            family = "current" if isinstance(format, Fp8Current) else "block"
            given = {"family": family, "element": format.element_name, "pow2": format.pow2}
            given |= {"amax_epsilon": format.amax_epsilon}
        case MX():
            given = {"family": "mx", "element": format.element_name, "scale_rounding": format.scale_rounding}
        case NVFP4():
            given = {"family": "nvfp4", "element": "e2m1", "fast_error": format.fast_error}
            given |= {"four_over_six": format.error_mode if format.four_over_six else "none"}
            given |= {"row_scaled": format.row_scaled, "rht": format.rht, "rht_sign": format.rht_signed}
            given |= {"sr": format.sr, "e4m3_max": format.scale_max}
        case _:
            return None
    return given | {"tile_rows": format.tile[0], "tile_cols": format.tile[1]}


@cache
def has_cuda() -> bool:
    """Whether the extension was built, and with its CUDA kernels."""
    return extension() is not None and extension().build_info()["cuda"]


def takes(dtype: torch.dtype, device_type: str, *formats: Format | None) -> bool:
    """Whether the kernels quantize that dtype there in these formats, None aside: all but Identity, on CPU and CUDA."""
    if dtype not in DTYPES or any(f is not None and plan(f.text).spec is None for f in formats):
        return False
    return device_type == "cpu" or (device_type == "cuda" and has_cuda())


def supports(x: Tensor, *formats: Format) -> bool:
    """takes() for a tensor."""
    return takes(x.dtype, x.device.type, *formats)


def exact_dtype(format: Format, device_type: str) -> torch.dtype:
    """dtype of the matrix that gemm=exact multiplies: float32 on CPU; on CUDA bfloat16, rounded to nearest even, and
    float32 only for the format whose product needs it (fp8_block+fp32_scale)."""
    needs_fp32 = device_type == "cpu" or (isinstance(format, Fp8Block) and not format.pow2)
    return torch.float32 if needs_fp32 else torch.bfloat16


class _Plan:
    """All about a format's outputs that does not depend on the matrix; shapes are kept per matrix size."""

    def __init__(self, text: str) -> None:
        format = parse(text)
        fields = spec_fields(format)
        self.format = format
        self.spec = extension().Spec(**fields) if fields and extension() else None
        self.layout = format.layout
        self.names = tuple(format.layout)
        self.factor = next((n for n in format.layout if _is_factor(format, n)), None)
        self.has_global = "g" in format.layout
        self.needs_amax = isinstance(format, (Fp8Current, NVFP4))
        self.needs_scratch = isinstance(format, Fp8Current)
        self._outputs: dict[tuple, list[tuple]] = {}

    def outputs(self, rows: int, cols: int, device: torch.device, exact: bool, statistics: bool) -> list[Tensor]:
        """Uninitialised: the format's buffers, or the exact matrix and its factor; then sums and row errors."""
        wanted = (rows, cols, device.type, exact, statistics)
        if type(rows) is not int or type(cols) is not int:  # the symbols of a traced graph
            found = self._outputs_of(*wanted)
        elif (found := self._outputs.get(wanted)) is None:
            found = self._outputs[wanted] = self._outputs_of(*wanted)
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in found]

    def _outputs_of(self, rows: int, cols: int, device_type: str, exact: bool, statistics: bool) -> list[tuple]:
        self.format.check_shape(rows, cols)
        buffers = self.layout.values()
        if exact:
            made = [((rows, cols), exact_dtype(self.format, device_type))]
            buffers = [self.layout[self.factor]] if self.factor else []
        else:
            made = []
        made += [(b.shape(rows, cols), b.dtype) for b in buffers]
        if statistics:
            down, across = -(-rows // TILE), -(-cols // TILE)
            made += [((down * across, 8), torch.float32), ((rows, across), torch.float32)]
        return made

    def direction(
        self, made: list[Tensor], key: list[int], amax: Tensor | None, found: Tensor | None, exact: bool, stats: bool
    ):
        """The extension's Direction that writes to these outputs."""
        sums, errors = (t.data_ptr() for t in made[-2:]) if stats else (0, 0)
        amax_ptr = 0 if amax is None else amax.data_ptr()
        found_ptr = 0 if found is None else found.data_ptr()
        matrix = matrix_dtype = codes = scales = globals_ = 0
        if exact:
            matrix, matrix_dtype = made[0].data_ptr(), DTYPES[made[0].dtype]
            if self.factor == "g":
                globals_ = made[1].data_ptr()
            elif self.factor == "s":
                scales = made[1].data_ptr()
        else:
            codes, scales = made[0].data_ptr(), made[1].data_ptr()
            globals_ = made[2].data_ptr() if self.has_global else 0
        if self.needs_amax and not amax_ptr and not found_ptr:
            found_ptr = globals_
        return _direction()(
            self.spec, *key, amax_ptr, found_ptr, codes, scales, globals_, matrix, matrix_dtype, sums, errors
        )


@cache
def _direction():
    return extension().Direction


@cache
def plan(text: str) -> _Plan:
    """The plan of a format's text; "" stands for a direction that is not wanted and has none."""
    return _Plan(text)


def _is_factor(format: Format, name: str) -> bool:
    return name == "g" or (name == "s" and isinstance(format, Fp8Current))


def _scratch(p: _Plan, amax: Tensor | None, device: torch.device) -> Tensor | None:
    """Where a current scaling's amax is found: apart from its scale, which is written in the end."""
    return torch.empty(1, dtype=torch.float32, device=device) if p.needs_scratch and amax is None else None


_library = Library("hqsweep", "DEF")
_library.define(
    "quantize(Tensor x, str rowwise, str columnwise, bool dequantized, bool rowwise_exact, bool columnwise_exact, "
    "int[] rowwise_key, int[] columnwise_key, Tensor? rowwise_amax, Tensor? columnwise_amax, bool statistics)"
    " -> Tensor[]"
)
_library.define(
    "find_amax_(Tensor x, str rowwise, str columnwise, bool dequantized, int[] rowwise_key, Tensor? rowwise_amax, "
    "Tensor(a!)? rowwise_found, Tensor(b!)? columnwise_found) -> ()"
)
_library.define("dequantize(Tensor[] buffers, str format, int rows, int cols, bool exact, ScalarType dtype) -> Tensor")


_library.define("scale_product(Tensor product, Tensor factor, ScalarType dtype) -> Tensor")


def _scale_product(product: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """fl(product * factor) in dtype; product float32 [m, n], factor float32 [1, 1], [m, 1] or [1, n]."""
    out = torch.empty_like(product, dtype=dtype)
    steps = tuple(0 if size == 1 else stride for size, stride in zip(factor.shape, factor.stride(), strict=True))
    index = product.device.index
    with torch.cuda.device(index):
        extension().scale_product_cuda(
            product.data_ptr(), factor.data_ptr(), *product.shape, *steps, out.data_ptr(), DTYPES[dtype], _stream(index)
        )
    return out


def _call(name: str, x: Tensor, row, column, dequantized: bool) -> None:
    matrix = (x.data_ptr(), DTYPES[x.dtype], *x.shape, *x.stride(), row, column, dequantized)
    if x.device.type == "cpu":
        getattr(extension(), f"{name}_cpu")(*matrix, torch.get_num_threads(), "")
        return
    function = getattr(extension(), f"{name}_cuda")
    index = x.device.index
    if index == torch.cuda.current_device():
        function(*matrix, _stream(index))
    else:
        with torch.cuda.device(index):
            function(*matrix, _stream(index))


def _stream(index: int) -> int:
    return torch._C._cuda_getCurrentRawStream(index)  # what current_stream() wraps in an object, at a tenth of its time


def _quantize(
    x, rowwise, columnwise, dequantized, rowwise_exact, columnwise_exact, rowwise_key, columnwise_key, rowwise_amax,
    columnwise_amax, statistics,
):  # fmt: skip
    made, row, column, kept = [], None, None, []
    rows, cols = x.shape
    if rowwise:
        p = plan(rowwise)
        mine = p.outputs(rows, cols, x.device, rowwise_exact, statistics)
        kept.append(_scratch(p, rowwise_amax, x.device))
        row = p.direction(mine, rowwise_key, rowwise_amax, kept[-1], rowwise_exact, statistics)
        made += mine
    if columnwise:
        p = plan(columnwise)
        mine = p.outputs(cols, rows, x.device, columnwise_exact, statistics)
        kept.append(_scratch(p, columnwise_amax, x.device))
        column = p.direction(mine, columnwise_key, columnwise_amax, kept[-1], columnwise_exact, statistics)
        made += mine
    _call("quantize", x, row, column, dequantized)
    return made


def _quantize_fake(
    x, rowwise, columnwise, dequantized, rowwise_exact, columnwise_exact, rowwise_key, columnwise_key, rowwise_amax,
    columnwise_amax, statistics,
):  # fmt: skip
    rows, cols = x.shape
    made = plan(rowwise).outputs(rows, cols, x.device, rowwise_exact, statistics) if rowwise else []
    if columnwise:
        made += plan(columnwise).outputs(cols, rows, x.device, columnwise_exact, statistics)
    return made


def _find_amax(
    x, rowwise, columnwise, dequantized, rowwise_key, rowwise_amax, rowwise_found, columnwise_found
):  # fmt: skip
    def direction(text: str, amax: Tensor | None, found: Tensor | None):
        if not text:
            return None
        pointers = (0 if t is None else t.data_ptr() for t in (amax, found))
        return extension().Direction(plan(text).spec, *rowwise_key, *pointers)

    row = direction(rowwise, rowwise_amax, rowwise_found)
    _call("find_amax", x, row, direction(columnwise, None, columnwise_found), dequantized)


def _dequantize(buffers, format, rows, cols, exact, dtype):
    p = plan(format)
    pointers = [t.data_ptr() for t in buffers] + [0] * (3 - len(buffers))
    out = torch.empty((rows, cols), dtype=dtype, device=buffers[0].device)
    if out.device.type == "cpu":
        threads = torch.get_num_threads()
        extension().dequantize_cpu(p.spec, rows, cols, *pointers, exact, out.data_ptr(), DTYPES[dtype], threads)
        return out
    with torch.cuda.device(out.device):
        stream = _stream(out.device.index)
        extension().dequantize_cuda(p.spec, rows, cols, *pointers, exact, out.data_ptr(), DTYPES[dtype], stream)
    return out


def quantize(x: Tensor, *arguments) -> list[Tensor]:
    """hqsweep::quantize. Outside a traced graph the function behind the operator is called at once: dispatch costs more
    than the launch, and there is nothing to record (no gradient flows through codes)."""
    if type(x) is Tensor and not torch.compiler.is_compiling():
        return _quantize(x, *arguments)
    return torch.ops.hqsweep.quantize(x, *arguments)


for _device in ("CPU", "CUDA"):
    _library.impl("quantize", _quantize, _device)
    _library.impl("find_amax_", _find_amax, _device)
    _library.impl("dequantize", _dequantize, _device)
_library.impl("scale_product", _scale_product, "CUDA")
register_fake("hqsweep::quantize", _quantize_fake, lib=_library)
register_fake(
    "hqsweep::scale_product", lambda product, factor, dtype: torch.empty_like(product, dtype=dtype), lib=_library
)
register_fake("hqsweep::find_amax_", lambda *_: None, lib=_library)
register_fake(
    "hqsweep::dequantize",
    lambda buffers, format, rows, cols, exact, dtype: buffers[0].new_empty((rows, cols), dtype=dtype),
    lib=_library,
)
