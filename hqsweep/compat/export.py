"""A recipe as a Python module for TransformerEngine: a quantizer factory that returns the recipe's quantizers.

The module imports TransformerEngine and nothing from hqsweep. hqsweep.compat runs it here with other imports.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from hqsweep.errors import UserError
from hqsweep.formats import MX, NVFP4, Format, Fp8Block, Fp8Current, Fp8Delayed, Identity
from hqsweep.quant.hybrid import HybridQuantizer, ProjectedQuantizer
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.custom import CustomRecipe
from hqsweep.recipe.roles import GRADIENTS
from hqsweep.recipe.sectioned import HEAD, HIGH_PRECISION, Override, Recipe
from hqsweep.recipe.sections import Section

TENSOR = "transformer_engine.pytorch.tensor"
MODULES = {
    "CustomRecipe": "transformer_engine.common.recipe",
    "Format": "transformer_engine.common.recipe",
    "DType": "transformer_engine.pytorch.constants",
    "DelayedScalingRequest": "transformer_engine.pytorch.quantization",
    "HybridQuantizer": f"{TENSOR}.hybrid_tensor",
    "IdentityQuantizer": f"{TENSOR}.identity_tensor",
    "Float8CurrentScalingQuantizer": f"{TENSOR}.float8_tensor",
    "Float8BlockQuantizer": f"{TENSOR}.float8_blockwise_tensor",
    "MXFP8Quantizer": f"{TENSOR}.mxfp8_tensor",
    "NVFP4Quantizer": f"{TENSOR}.nvfp4_tensor",
}
"""Name in TransformerEngine -> the module that it is imported from."""

LAYER = '''def _layer(name):
    """The first number among the parts of a module's name, or None."""
    match = re.search(r"(?:^|\\.)(\\d+)(?:\\.|$)", name)
    return int(match[1]) if match else None


'''


def to_transformer_engine(recipe: AnyRecipe, name: str, layers: int | None = None) -> str:
    """The text of a module with `qfactory` and `recipe`, and with SCHEDULE when recipes change during training.

    layers: the number of layers of the model, for overrides that count them.

    Raises:
        UserError: every slot whose format TransformerEngine lacks, and everything else that it cannot express.
    """
    stages = [(0, recipe), *((change.at, change.recipe) for change in recipe.schedule)]
    bodies = [_stage(variant, index, layers) for index, (_, variant) in enumerate(stages)]
    code = "\n\n".join(bodies)
    if len(stages) > 1:
        entries = ", ".join(f"({at}, recipe{_suffix(index)})" for index, (at, _) in enumerate(stages))
        comment = "# Updates done, or their fraction below 1, and the recipe from then on."
        code += f"\n{comment}\nSCHEDULE = [{entries}]\n"
    code = LAYER + code if "_layer(" in code else code
    standard = {"re.search(": "import re", "fnmatchcase(": "from fnmatch import fnmatchcase", "torch.": "import torch"}
    imports = [line for use, line in standard.items() if use in code]
    theirs = [f"from {module} import {used}" for used, module in MODULES.items() if re.search(rf"\b{used}[(.]", code)]
    name = name.encode("unicode_escape").decode().replace('"', '\\"')  # it must not end a string
    title = (
        f'"""Recipe \'{name}\' as a quantizer factory for TransformerEngine, written by hqsweep recipe export.\n\n'
        "    with autocast(recipe=recipe):\n        output = model(input)\n\n"
        "Modules are told apart by their names, so give each its name=.\n"
        '"""\n'
    )
    return "\n".join([title, *imports, *([""] if imports else []), *sorted(theirs), "", "", code])


def _stage(recipe: AnyRecipe, index: int, layers: int | None) -> str:
    if isinstance(recipe, CustomRecipe):
        raise UserError(f"recipe: it is a Python factory already, {recipe.path}; import it there")
    faults = list(_faults(recipe))
    if faults:
        raise UserError("; ".join(dict.fromkeys(faults)))
    lines = [f"def qfactory{_suffix(index)}(role):", '    """The quantizer of a slot."""']
    lines += ["    if role is None:", "        return IdentityQuantizer()"]
    lines += ["    slot = (role.module_type, role.tensor_type)"]
    for number, override in reversed(list(enumerate(recipe.overrides))):
        lines += [f"    if {_condition(override, number, layers)}:"]
        lines += _match({k: getattr(override, k) for k in ("linear", "grouped_linear", "dpa")}, "        ")
    lines += [
        f'    if role.module_type == "linear" and role.name == "{HEAD}":',
        *_match({"linear": recipe.head}, " " * 8),
    ]
    sections: dict[str, Section | None] = {"linear": recipe.linear, "grouped_linear": recipe.grouped_linear}
    attention = _quantizes_attention(recipe)
    if attention:
        sections["dpa"] = recipe.dpa
    lines += _match(sections, "    ")
    if attention:  # slots of the fused kernel that no module of the recipe owns
        lines += ['    if "dpa_output" in role.name:', f"        return {_call(recipe.dpa.qkv, 'qkv')}"]
        lines += ['    if "dpa_grad_input" in role.name:', f"        return {_call(recipe.dpa.do, 'do')}"]
    lines += ["    return IdentityQuantizer()", "", ""]
    dpa = ", fp8_dpa=True" if attention else ""
    lines += [f"recipe{_suffix(index)} = CustomRecipe(qfactory=qfactory{_suffix(index)}{dpa})", ""]
    return "\n".join(lines)


def _suffix(index: int) -> str:
    return f"_{index}" if index else ""


def _quantizes_attention(recipe: Recipe) -> bool:
    return any(s != HIGH_PRECISION["dpa"] for s in (recipe.dpa, *(o.dpa for o in recipe.overrides)) if s is not None)


def _faults(recipe: Recipe) -> Iterator[str]:
    """The parts of the recipe that TransformerEngine cannot express, with key paths."""
    for where, section in _sections(recipe):
        requests: dict[bool, str] = {}  # for gradients, and for other tensors
        for tensor in section.tensors():
            q, gradient, slot = getattr(section, tensor), tensor in GRADIENTS, f"{where}.{tensor}"
            if isinstance(q, ProjectedQuantizer):
                yield f"{slot}: TransformerEngine has no projection to {q.projection}"
            elif not q.delayed:
                formats = [f for f in (q.rowwise, q.columnwise) if _quantizer_call(f) is None]
                formats += [f"rowwise {q.rowwise}"] if q.rowwise.rht and q.rowwise not in formats else []
                yield from (f"{slot}: TransformerEngine has no {format}" for format in formats)
            elif q.rowwise != q.columnwise or q.columnwise_source != "original":
                yield f"{slot}: TransformerEngine takes fp8_delayed only in both directions of a tensor, not {q}"
            elif q.rowwise.element_name == "e5m2" and not gradient:
                yield f"{slot}: TransformerEngine takes {q} for gradients only"
            elif q.rowwise.skip_nonfinite:
                yield f"{slot}: TransformerEngine keeps inf in its histories, and has no +skip_nonfinite ({q})"
            elif requests.setdefault(gradient, _request(q.rowwise, tensor)) != _request(q.rowwise, tensor):
                same = "gradients" if gradient else "forward tensors"
                yield f"{slot}: TransformerEngine takes one fp8_delayed for all {same} of a module, not also {q}"


def _sections(recipe: Recipe) -> Iterator[tuple[str, Section]]:
    """Every section that the module has to express, with its key path."""
    sections = {f"recipe.{key}": getattr(recipe, key) for key in ("linear", "grouped_linear", "dpa", "head")}
    for index, override in enumerate(recipe.overrides):
        for key in ("linear", "grouped_linear", "dpa"):
            sections[f"recipe.overrides[{index}].{key}"] = getattr(override, key)
    yield from ((where, section) for where, section in sections.items() if section)


def _condition(override: Override, index: int, layers: int | None) -> str:
    parts = [f"fnmatchcase(role.name, {override.name!r})"] if override.name != "*" else []
    if override.layers is not None:
        if override.layers.relative and layers is None:
            where = f"recipe.overrides[{index}].layers"
            raise UserError(f"{where}: '{override.layers}' counts the layers of a model; say how many by --layers N")
        chosen = override.layers.of(range(layers)) if override.layers.relative else set(override.layers.indices)
        parts.append(f"_layer(role.name) in {sorted(chosen)}")
    return " and ".join(parts) or "True"


def _match(sections: Mapping[str, Section | None], indent: str) -> list[str]:
    """A match over slots that returns their quantizers; equal sections and equal slots share their cases."""
    types: dict[Section, list[str]] = {}
    for module_type, section in sections.items():
        if section is not None:
            types.setdefault(section, []).append(module_type)
    lines = [f"{indent}match slot:"]
    for section, names in types.items():
        tensors: dict[str, list[str]] = {}
        for tensor in section.tensors():
            tensors.setdefault(_call(getattr(section, tensor), tensor), []).append(tensor)
        for call, same in tensors.items():
            lines += [f"{indent}    case ({_alternatives(names)}, {_alternatives(same)}):"]
            lines += [f"{indent}        return {call}"]
    return lines


def _alternatives(names: Sequence[str]) -> str:
    return " | ".join(f'"{name}"' for name in names)


def _call(quantizer: HybridQuantizer, tensor: str) -> str:
    """The expression that makes the quantizer of a tensor."""
    row, column, source = quantizer.rowwise, quantizer.columnwise, quantizer.columnwise_source
    if row.delayed:
        return _request(row, tensor)
    if row == column.rowwise_form and source == "original":
        return _quantizer_call(column)
    return (
        f"HybridQuantizer(rowwise_quantizer={_quantizer_call(row)}, columnwise_quantizer="
        f'{_quantizer_call(column)}, columnwise_source="{source}")'
    )


def _quantizer_call(format: Format) -> str | None:
    """The expression for a format in both directions; None when TransformerEngine has no such format."""
    match format:
        case Identity():
            dtypes = {"bf16": "", "fp16": "dtype=torch.float16", "fp32": "dtype=torch.float32"}
            return f"IdentityQuantizer({dtypes[format.name]})"
        case Fp8Current():
            return (
                f'Float8CurrentScalingQuantizer({_fp8(format)}, device="cuda", force_pow_2_scales={format.pow2},'
                f" amax_epsilon={format.amax_epsilon})"
            )
        case Fp8Block():
            return (
                f"Float8BlockQuantizer({_fp8(format)}, rowwise=True, columnwise=True,"
                f" amax_epsilon={format.amax_epsilon}, force_pow_2_scales={format.pow2},"
                f" block_scaling_dim={2 if format.two_d else 1})"
            )
        case MX() if format == MX(name="mxfp8", element_name=format.element_name, two_d=format.two_d):
            return f"MXFP8Quantizer({_fp8(format)}{', with_2d_quantization=True' if format.two_d else ''})"
        case NVFP4() if not (format.fast_error or format.eden) and format.rht in (0, 16):
            return _nvfp4_call(format)
    return None


def _nvfp4_call(format: NVFP4) -> str:
    """Return the NVFP4Quantizer(...) of a format, with the arguments that differ from the defaults."""
    options = {
        "with_rht": format.rht > 0,
        "with_post_rht_amax": format.rht > 0,
        "with_2d_quantization": format.two_d,
        "stochastic_rounding": format.sr,
        "row_scaled_nvfp4": format.row_scaled,
        "nvfp4_use_4over6": format.four_over_six,
    }
    words = [f"{name}=True" for name, chosen in options.items() if chosen]
    if format.four_over_six:
        words += [f"nvfp4_e4m3_max={format.scale_max}", f'nvfp4_4over6_err_mode="{format.error_mode.upper()}"']
    words += [] if format.rht_signed else ["with_random_sign_mask=False"]
    return f"NVFP4Quantizer({', '.join(words)})"


def _request(format: Fp8Delayed, tensor: str) -> str:
    """The request for fp8_delayed: TransformerEngine keeps the state, and under HYBRID gives gradients E5M2."""
    hybrid = (format.element_name == "e5m2") == (tensor in GRADIENTS)
    algorithm = "most_recent" if format.most_recent else "max"
    local = ", reduce_amax=False" if format.local_amax else ""
    return (
        f"DelayedScalingRequest(fp8_format=Format.{'HYBRID' if hybrid else 'E4M3'},"
        f' amax_history_len={format.history}, amax_compute_algo="{algorithm}"{local})'
    )


def _fp8(format: Fp8Current | Fp8Block | MX) -> str:
    return f"fp8_dtype=DType.kFloat8{format.element_name.upper()}"
