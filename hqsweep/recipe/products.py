"""The matrix products of modules, and why operands of these products cannot meet or do not fit their blocks."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from hqsweep.errors import UserError
from hqsweep.formats import Format
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.pairs import MODULE_GEMMS, cannot_meet, pair_fault
from hqsweep.recipe.roles import QuantizerRole, module_roles
from hqsweep.recipe.sections import Section

DeviceFault = Callable[[Format, Format, int, int, int], str | None]
"""(a, b, m, n, k) -> why a device's tensor cores do not multiply [m, k] by [n, k] transposed, or None."""
NATIVE_MODULES = ("linear", "grouped_linear")
"""Module types with products for gemm=native."""


@dataclass(frozen=True, kw_only=True)
class GemmModule:
    """A module with matrix products."""

    module_type: str
    name: str
    shapes: Mapping[str, tuple[int, int, int]]
    """GEMM -> (m, n, k) of mm_t; k is the contracted axis."""
    context: int | None = None
    """Tokens of attention, which its other GEMMs contract."""

    @property
    def roles(self) -> list[QuantizerRole]:
        return module_roles(self.module_type, self.name)


def linear_module(name: str, in_features: int, out_features: int, tokens: int) -> GemmModule:
    """Return a linear. tokens: rows of its input in a training step."""
    shapes = {
        "fprop": (tokens, out_features, in_features),
        "dgrad": (tokens, in_features, out_features),
        "wgrad": (out_features, in_features, tokens),
    }
    return GemmModule(module_type="linear", name=name, shapes=shapes)


def grouped_linear_module(name: str, in_features: int, out_features: int) -> GemmModule:
    """Return a grouped linear.

    An expert's token count is unknown before it runs. That axis counts as 0, which fits every block: other counts are
    padded with zeros (GroupedLinear.quantization_alignment).
    """
    shapes = linear_module(name, in_features, out_features, 0).shapes
    return GemmModule(module_type="grouped_linear", name=name, shapes=shapes)


def attention_module(name: str, head_dim: int, context: int) -> GemmModule:
    """Return dot-product attention over `context` tokens."""
    shapes = dict.fromkeys(("qk", "ds"), (context, context, head_dim))
    return GemmModule(module_type="dpa", name=name, shapes=shapes, context=context)


def attention_faults(quantizers: Mapping[str, HybridQuantizer], context: int) -> Iterator[str]:
    """Yield why attention over `context` tokens cannot take a quantizer. quantizers: of its four slots, by tensor.

    The matrices of all heads are folded into rows, so blocks along tokens must end where a matrix ends.
    """
    for tensor, quantizer in quantizers.items():
        by_rows = [format for format in (quantizer.rowwise, quantizer.columnwise) if format.row_scaled]
        if by_rows:
            yield f"{tensor} {by_rows[0]}: attention takes one global amax a tensor"
        for direction, format in (("rowwise", quantizer.rowwise), ("columnwise", quantizer.columnwise)):
            tokens = direction == "columnwise" or tensor in ("s", "dp")
            along = max(*format.tile, format.rht) if tokens else format.tile[0]
            if along > 1 and context % along:
                takes = f"its blocks take a multiple of {along}"
                yield f"{tensor} {direction} {format}: the context has {context} positions; {takes}"


def check_products(sections: Iterable[tuple[str, str, Section]], gemm: str) -> None:
    """Raise UserError, with module and slots, for products whose operands cannot meet in this mode.

    sections: (module type, name, quantizers).
    """
    faults = "; ".join(section_faults(sections, gemm))
    if faults:
        raise UserError(faults)


def section_faults(sections: Iterable[tuple[str, str, Section]], gemm_mode: str) -> Iterator[str]:
    """Yield why products of modules, given as (type, name, quantizers), are impossible, whatever the sizes."""
    faults = []
    for module_type, name, section in sections:
        module = GemmModule(module_type=module_type, name=name, shapes={})
        quantizers = {role: getattr(section, role.tensor_type) for role in module.roles}
        faults += [(name, text) for text in gemm_faults(module, quantizers, gemm_mode, None)]
    yield from counted(faults)


def counted(faults: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield equal faults of several modules, given as (name, text), once, with the first module's name."""
    faults = list(faults)
    count = Counter(text for _, text in faults)
    first = {text: name for name, text in reversed(faults)}
    for text, times in count.items():
        yield f"{first[text]} {text}" + (f" (and in {times - 1} more)" if times > 1 else "")


def gemm_faults(
    module: GemmModule,
    quantizers: Mapping[QuantizerRole, HybridQuantizer],
    gemm_mode: str,
    device_fault: DeviceFault | None,
) -> Iterator[str]:
    """Yield why products of a module are impossible in this mode, on a device if device_fault says so."""
    if module.context is not None:
        yield from attention_faults({role.tensor_type: quantizers[role] for role in module.roles}, module.context)
    for gemm, operands in MODULE_GEMMS.get(module.module_type, {}).items():
        shape = module.shapes.get(gemm, (0, 0, 0))
        formats = tuple(
            getattr(quantizers[QuantizerRole(module.module_type, tensor, module.name)], direction)
            for tensor, direction in operands
        )
        spelled = [f"{t} {d} {f}" for (t, d), f in zip(operands, formats, strict=True)]
        misfits = {s: f.column_multiple for s, f in zip(spelled, formats, strict=True) if shape[2] % f.column_multiple}
        if misfits:
            takers = " and ".join(f"{s} takes a multiple of {m}" for s, m in misfits.items())
            yield f"{gemm}: the contracted axis has {shape[2]} element{'s' * (shape[2] != 1)}, but {takers}"
        fault = pair_fault(spelled, formats, gemm_mode)
        if not fault and gemm_mode == "native":
            missing = _native_fault(module.module_type, *formats)
            missing = missing or (device_fault(*formats, *shape) if device_fault else None)
            fault = cannot_meet(spelled, missing, gemm_mode)
        if fault:
            yield f"{gemm}: {fault}"


def _native_fault(module_type: str, a: Format, b: Format) -> str | None:
    if module_type in NATIVE_MODULES or (a.high_precision and b.high_precision):
        return None
    return f"only the products of linears are built; leave {module_type} in high precision, or set gemm=exact"
