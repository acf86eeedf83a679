"""The compiled extension as torch operators: hqsweep::quantize, find_amax_, dequantize, and on CUDA scale_product.

The extension does not link to torch (one build serves every torch), so this is the only place where tensors become
addresses. Bytes equal the reference's; tests and the parity job hold that. Formats travel as their canonical text, ""
where a direction is not wanted. Work is enqueued on the current stream and nothing waits for it. Autograd is left to
the modules.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import Library, register_fake

from hqsweep.formats import Format
from hqsweep.ops.plan import DTYPES, NO_KEY, SHAPES_KEPT, Plan, extension, has_kernels, plan, plan_of

__all__ = ["extension", "supports"]

try:  # what Inductor's code allocates by, on the current device: a third of torch.empty's time
    from torch._C._dynamo.guards import _empty_strided_cpu, _empty_strided_cuda
except ImportError:

    def _strided(device, size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    _empty_strided_cpu, _empty_strided_cuda = partial(_strided, "cpu"), partial(_strided, "cuda")


def supports(x: Tensor, *formats: Format) -> bool:
    """Whether the kernels take this input in these formats: all but Identity, on CPU and on CUDA."""
    return x.dtype in DTYPES and has_kernels(x.device.type) and all(plan_of(f).spec is not None for f in formats)


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
_library.define("scale_product(Tensor product, Tensor factor, ScalarType dtype, float before=1.0) -> Tensor")


# Arguments in the order of the schema.
def _quantize(x, rowwise, columnwise, dequantized, row_exact, column_exact, row_key, column_key, row_amax, column_amax,
              statistics):  # fmt: skip
    (rows, cols), on_gpu = x.shape, x.is_cuda
    made, kept, row, column = [], [], None, None
    if rowwise:
        side = _side(rowwise, rows, cols, row_exact, row_amax is not None, on_gpu, statistics)
        row = direction(side, x, rows, made, kept, row_key, row_amax)
    if columnwise:
        side = _side(columnwise, cols, rows, column_exact, column_amax is not None, on_gpu, statistics)
        column = direction(side, x, cols, made, kept, column_key, column_amax)
    call = extension().quantize_cuda if on_gpu else extension().quantize_cpu
    _run(x, call, x.data_ptr(), DTYPES[x.dtype], rows, cols, *x.stride(), row, column, dequantized)
    return made


def _quantize_fake(x, rowwise, columnwise, dequantized, row_exact, column_exact, row_key, column_key, row_amax,
                   column_amax, statistics):  # fmt: skip
    rows, cols = x.shape
    made, rest = [], (x.device.type == "cuda", statistics)
    if rowwise:
        made += plan(rowwise).allocations(rows, cols, row_exact, row_amax is not None, *rest)
    if columnwise:
        made += plan(columnwise).allocations(cols, rows, column_exact, column_amax is not None, *rest)
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in made]


def _find_amax(x, rowwise, columnwise, dequantized, row_key, row_amax, row_found, column_found):
    rows, cols = x.shape
    row = finder(plan(rowwise), x, rows, row_key, row_amax, row_found) if rowwise else None
    column = finder(plan(columnwise), x, cols, NO_KEY, None, column_found) if columnwise else None
    call = extension().find_amax_cuda if x.is_cuda else extension().find_amax_cpu
    _run(x, call, x.data_ptr(), DTYPES[x.dtype], rows, cols, *x.stride(), row, column, dequantized)


def _dequantize(buffers, format, rows, cols, exact, dtype):
    first, addresses = buffers[0], [t.data_ptr() for t in buffers] + [0] * (3 - len(buffers))
    out = empty(first, (rows, cols), (cols or 1, 1), dtype)
    call = extension().dequantize_cuda if first.is_cuda else extension().dequantize_cpu
    arguments = (plan(format).spec, rows, cols, *addresses, exact, out.data_ptr(), DTYPES[dtype])
    if first.is_cuda:
        _run(first, call, *arguments)
    else:
        call(*arguments, torch.get_num_threads())
    return out


def _scale_product(product: Tensor, factor: Tensor, dtype: torch.dtype, before: float = 1.0) -> Tensor:
    """fl(fl(product * before) * factor) in float32, rounded to dtype; product float32 or bfloat16 [m, n], contiguous,
    factor float32 [1, 1], [m, 1] or [1, n]."""
    out = torch.empty_like(product, dtype=dtype)
    steps = (0 if size == 1 else stride for size, stride in zip(factor.shape, factor.stride(), strict=True))
    given = (product.data_ptr(), DTYPES[product.dtype], before, factor.data_ptr(), *product.shape, *steps)
    _run(product, extension().scale_product_cuda, *given, out.data_ptr(), DTYPES[dtype])
    return out


def empty(x: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """On x's device, which is the current one."""
    return (_empty_strided_cuda if x.is_cuda else _empty_strided_cpu)(shape, stride, dtype)


class Side(NamedTuple):
    """What is made in one direction of all matrices of one shape: outputs, and the addresses that they are."""

    plan: Plan
    outputs: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
    """Shape, stride and dtype, in the order of the operator's."""
    scratch: int
    """How many of the last ones are no outputs, and needed until the call has run."""
    places: list[tuple[int, int]]
    """An output, and which of the extension's addresses it is."""
    exact_dtype: int


_ADDRESSES = ("amax", "found", "codes", "scales", "global", "exact", "exact_dtype", "sums", "row_errors")
"""Arguments of the extension's Direction, from its fifth on."""


def side(
    p: Plan, outputs: Sequence[tuple], exact: bool, given: bool, statistics: bool = False, matrices: int = 1
) -> Side:
    """outputs: (shape, dtype) of what the operator gives; given: whether the amaxes of the matrices are."""
    names = ["exact" if exact else "codes"]
    if exact:
        names += {"g": ["global"], "s": ["scales"]}.get(None if given and p.amax_name == "g" else p.amax_name, [])
    else:
        names += ["scales", "global"][: len(outputs) - 1 - 2 * statistics]
    names += ["sums", "row_errors"] * statistics
    outputs, scratch = list(outputs), 0
    if p.amax_name == "s" and not given:  # found apart from the scale, which takes its buffer in the end
        outputs.append(((matrices,), torch.float32))
        names.append("found")
        scratch = 1
    places = [(i, _ADDRESSES.index(name)) for i, name in enumerate(names)]
    places += [(i, _ADDRESSES.index("found")) for i, name in enumerate(names) if name == "global"]
    strided = [(tuple(shape), (shape[1] or 1, 1) if len(shape) == 2 else (1,), dtype) for shape, dtype in outputs]
    return Side(p, strided, scratch, places, DTYPES[outputs[0][1]] if exact else 0)


@lru_cache(maxsize=SHAPES_KEPT)
def _side(text: str, rows: int, cols: int, exact: bool, given: bool, on_gpu: bool, statistics: bool) -> Side:
    """Of one matrix. Remembered: a training repeats its shapes."""
    p = plan(text)
    return side(p, p.allocations(rows, cols, exact, given, on_gpu, statistics), exact, given, statistics)


def direction(side: Side, x: Tensor, rows: int, made: list[Tensor], kept: list[Tensor], key, amax: Tensor | None,
              matrices: int = 1, keys: Tensor | None = None, turned: bool = False):  # fmt: skip
    """The extension's Direction that fills new outputs, which join `made`; `kept` holds what it needs beside them until
    it ran. Of a group: `rows` of all `matrices` together, and a table of their keys. turned: exact values by rows of
    X."""
    make = _empty_strided_cuda if x.is_cuda else _empty_strided_cpu
    mine = [make(*wanted) for wanted in side.outputs]
    addresses = [0, 0, 0, 0, 0, 0, side.exact_dtype, 0, 0]
    for i, place in side.places:
        addresses[place] = mine[i].data_ptr()
    if amax is not None:
        side.plan.check_amax("given amax", amax, rows, x, matrices)
        addresses[0] = amax.data_ptr()
    if side.scratch:
        kept += mine[-side.scratch :]
        del mine[-side.scratch :]
    made += mine
    return extension().Direction(side.plan.spec, *key, *addresses, 0 if keys is None else keys.data_ptr(), turned)


def finder(p: Plan, x: Tensor, rows: int, key, amax: Tensor | None, found: Tensor | None, matrices: int = 1,
           keys: Tensor | None = None):  # fmt: skip
    """The Direction that only finds a global amax, or those of a group as `direction` has one."""
    p.check_amax("given amax", amax, rows, x, matrices)
    p.check_amax("found amax", found, rows, x, matrices)
    addresses = (0 if t is None else t.data_ptr() for t in (amax, found))
    return extension().Direction(p.spec, *key, *addresses, keys=0 if keys is None else keys.data_ptr())


def _run(x: Tensor, call: Callable, *arguments) -> None:
    """On the current stream, or on torch's threads by the best instruction set."""
    if x.is_cuda:
        # What torch.cuda.current_stream() wraps in an object, at a tenth of its time.
        call(*arguments, torch._C._cuda_getCurrentRawStream(x.get_device()))
    else:
        call(*arguments, torch.get_num_threads(), "")


def direct(x: Tensor) -> bool:
    """Whether the function behind an operator can be called at once: outside of traced graphs and dispatch modes, where
    dispatch costs more than the launch and there is nothing to record (no gradient flows through codes)."""
    plain = type(x) is Tensor and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()
    return plain and (x.is_cpu or x.is_cuda)


def quantize(x: Tensor, *arguments) -> list[Tensor]:
    """hqsweep::quantize, directly where that is possible."""
    if direct(x):
        return (_quantize if x.is_cpu else _quantize_on_cuda)(x, *arguments)
    return torch.ops.hqsweep.quantize.default(x, *arguments)


def find_amax(x: Tensor, *arguments) -> None:
    """hqsweep::find_amax_, directly where that is possible."""
    if direct(x):
        return (_find_amax if x.is_cpu else _find_amax_on_cuda)(x, *arguments)
    torch.ops.hqsweep.find_amax_.default(x, *arguments)


def scale_product(product: Tensor, factor: Tensor, dtype: torch.dtype, before: float = 1.0) -> Tensor:
    """hqsweep::scale_product, directly where that is possible."""
    if direct(product):
        return _scale_product_on_cuda(product, factor, dtype, before)
    return torch.ops.hqsweep.scale_product.default(product, factor, dtype, before)


def on_its_device(function: Callable) -> Callable:
    """function(tensor or tensors, ...) with the tensor's device as the current one."""

    @wraps(function)
    def guarded(first, *others):
        device = (first[0] if isinstance(first, list) else first).get_device()
        if device == torch.cuda.current_device():
            return function(first, *others)
        with torch.cuda.device(device):
            return function(first, *others)

    return guarded


_quantize_on_cuda, _find_amax_on_cuda = on_its_device(_quantize), on_its_device(_find_amax)
_scale_product_on_cuda = on_its_device(_scale_product)
_library.impl("quantize", _quantize, "CPU")
_library.impl("quantize", _quantize_on_cuda, "CUDA")
for _name, _function in {"find_amax_": _find_amax, "dequantize": _dequantize}.items():
    _library.impl(_name, _function, "CPU")
    _library.impl(_name, on_its_device(_function), "CUDA")
register_fake("hqsweep::quantize", _quantize_fake, lib=_library)
_library.impl("scale_product", _scale_product_on_cuda, "CUDA")
register_fake(
    "hqsweep::scale_product",
    lambda product, factor, dtype, before=1.0: torch.empty_like(product, dtype=dtype),
    lib=_library,
)
register_fake("hqsweep::find_amax_", lambda *_: None, lib=_library)
register_fake(
    "hqsweep::dequantize",
    lambda buffers, format, rows, cols, exact, dtype: buffers[0].new_empty((rows, cols), dtype=dtype),
    lib=_library,
)
