"""CustomRecipe, autocast and quantized_model_init by TransformerEngine's arguments, in its order."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from hqsweep import nn
from hqsweep.compat.arguments import flag, shown
from hqsweep.compat.quantizers import Format
from hqsweep.errors import UserError
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe import custom
from hqsweep.recipe.base import AnyRecipe, Change
from hqsweep.recipe.sections import Section

Recipe = AnyRecipe | Section | HybridQuantizer | str | Mapping[str, Any] | None


class CustomRecipe(custom.CustomRecipe):
    """hqsweep.recipe.CustomRecipe, whose arguments come in TransformerEngine's order.

    fp8_format and quantization_alignment change no number: the factory says formats, and each format its alignment.
    UserError for fp8_mha and backward_override, which the factory says here.
    """

    def __init__(
        self,
        qfactory: Callable[..., Any],
        fp8_format: Format = Format.HYBRID,
        fp8_dpa: bool = False,
        fp8_mha: bool = False,
        backward_override: str | None = None,
        quantization_alignment: int = 128,
        *,
        gemm: str = "exact",
        schedule: tuple[Change, ...] = (),
    ) -> None:
        if flag("CustomRecipe", "fp8_mha", fp8_mha):
            raise UserError(
                "CustomRecipe: fp8_mha=True has no counterpart here; leave it out: hqsweep.nn's MultiheadAttention has"
                " AttentionOptions(quantize_boundaries=True)"
            )
        if backward_override is not None:
            raise UserError(
                f"CustomRecipe: backward_override={shown(backward_override)} has no counterpart here; have the factory"
                " return a HybridQuantizer with columnwise_quantizer=IdentityQuantizer(), and for gradients"
                " IdentityQuantizer()"
            )
        dpa = flag("CustomRecipe", "fp8_dpa", fp8_dpa)
        super().__init__(qfactory=qfactory, fp8_dpa=dpa, gemm=gemm, schedule=schedule)

    def __reduce__(self) -> tuple[Any, ...]:
        _, (qfactory, fp8_dpa, gemm, schedule) = super().__reduce__()
        return _rebuild, (qfactory, fp8_dpa, gemm, schedule)


def _rebuild(qfactory: Callable, fp8_dpa: bool, gemm: str, schedule: tuple[Change, ...]) -> CustomRecipe:
    return CustomRecipe(qfactory, fp8_dpa=fp8_dpa, gemm=gemm, schedule=schedule)


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
) -> AbstractContextManager[None]:
    """hqsweep.nn.autocast, whose arguments come in TransformerEngine's order. _graph has no effect. UserError for
    calibrating, and for a group, which hqsweep.nn.quantization takes."""
    if flag("autocast", "calibrating", calibrating):
        raise UserError(
            "autocast: calibrating=True has no counterpart here; leave it out: fp8_delayed takes the amax of the tensor"
            " itself where its history is empty"
        )
    if amax_reduction_group is not None:
        raise UserError(
            f"autocast: amax_reduction_group={shown(amax_reduction_group)} is given to"
            " hqsweep.nn.quantization(amax_group=...) here; by default amaxes are those of all ranks"
        )
    return nn.autocast(flag("autocast", "enabled", enabled), recipe=recipe)


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """hqsweep.nn.quantized_model_init, whose arguments come in TransformerEngine's order."""
    kind, kept = "quantized_model_init", preserve_high_precision_init_val
    options = {"preserve_high_precision_init_val": flag(kind, "preserve_high_precision_init_val", kept)}
    with nn.quantized_model_init(enabled=flag(kind, "enabled", enabled), recipe=recipe, **options):
        yield
