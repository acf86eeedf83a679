"""Contexts and helpers by TransformerEngine's names: autocast, held weights, their masters, recomputation, padding."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hqsweep import nn, quant
from hqsweep.compat.arguments import flag, refuse, shown
from hqsweep.compat.quantizer import Quantizer
from hqsweep.errors import UserError
from hqsweep.nn.core.context import autocast_recipe, current, replayed, within
from hqsweep.parallel.shards.raw_data import follows_rowwise
from hqsweep.quant.delayed import FIRST_TURN
from hqsweep.quant.hybrid import HybridQuantizer as Frozen
from hqsweep.recipe.base import AnyRecipe
from hqsweep.recipe.sections import Section

RecipeArgument = AnyRecipe | Section | Frozen | Quantizer | str | Mapping[str, Any] | None


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: RecipeArgument = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
) -> AbstractContextManager[None]:
    """hqsweep.nn.autocast, whose arguments come in TransformerEngine's order. _graph has no effect. UserError for
    calibrating, for a group, which hqsweep.nn.quantization takes, and without a recipe, where TransformerEngine chooses
    one by the GPU."""
    if flag("autocast", "calibrating", calibrating):
        raise UserError(
            "autocast: calibrating=True has no counterpart here; leave it out: fp8_delayed takes the amax of the tensor"
            " itself where its history is empty"
        )
    if amax_reduction_group is not None and amax_reduction_group is not _all_ranks():
        raise UserError(
            f"autocast: amax_reduction_group={shown(amax_reduction_group)} is given to"
            " hqsweep.nn.quantization(amax_group=...) here; by default amaxes are those of all ranks"
        )
    entered = nn.autocast(flag("autocast", "enabled", enabled), recipe=recipe)
    return _in_turn(entered) if enabled else entered


_TURNS = count(FIRST_TURN)


@contextmanager
def _in_turn(entered: AbstractContextManager[None]) -> Iterator[None]:
    """Enter an autocast, which is a step of delayed scaling if it is the outermost one and there is no step."""
    context = current()
    alone = context.step is None and autocast_recipe() is None
    with within(replace(context, turn=next(_TURNS))) if alone else nullcontext(), entered:
        yield


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: RecipeArgument = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> AbstractContextManager[None]:
    """autocast() by its former name and arguments."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


def _all_ranks() -> Any:
    """The group of all ranks, or None."""
    return torch.distributed.group.WORLD if torch.distributed.is_available() else None


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: RecipeArgument = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """hqsweep.nn.quantized_model_init, whose arguments come in TransformerEngine's order."""
    kind, kept = "quantized_model_init", preserve_high_precision_init_val
    options = {"preserve_high_precision_init_val": flag(kind, "preserve_high_precision_init_val", kept)}
    with nn.quantized_model_init(enabled=flag(kind, "enabled", enabled), recipe=recipe, **options):
        yield


fp8_model_init = quantized_model_init


def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: ProcessGroup | None,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """hqsweep.quant.quantize_master_weights, which takes all formats and hybrids. A shard is written in place of its
    weight. UserError for a weight without operands."""
    shards = fsdp_shard_model_weights or [None] * len(model_weights)
    own = [weight if shard is None else shard for weight, shard in zip(model_weights, shards, strict=True)]
    for weight in own:
        if isinstance(weight, quant.HybridQuantizedTensor) and not any(weight.get_usages().values()):
            raise UserError(
                f"quantize_master_weights: a weight {list(weight.shape)} in {weight.quantizer} has dropped both rowwise"
                " and columnwise operands; quantize its values again"
            )
    options = {"manual_post_all_gather_processing": manual_post_all_gather_processing}
    quant.quantize_master_weights(own, master_weights, start_offsets, group, **options)


def post_all_gather_processing(model_weights: Sequence[Any]) -> None:
    """hqsweep.quant.post_all_gather_processing, without the weights that quantize_master_weights has written whole: in
    their own memory, with a columnwise operand of the original values."""
    quant.post_all_gather_processing(
        [weight for weight in model_weights if weight.shared.moved or follows_rowwise(weight)]
    )


def _available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """True, or with return_reason (True, ""): every format runs on every device, by emulation where it lacks it."""
    return (True, "") if return_reason else True


is_fp8_available = is_mxfp8_available = is_fp8_block_scaling_available = is_nvfp4_available = _available
is_bf16_available = _available


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs), computed again in backward with the same random bits, under this call's autocast() and
    hqsweep.nn.quantization(). torch's generators are restored, too.

    use_reentrant and tp_group have no effect; UserError for distribute_saved_activations and get_rng_state_tracker.
    """
    for name in ("use_reentrant", "tp_group"):
        kwargs.pop(name, None)
    asked = {name: kwargs.pop(name, None) for name in ("distribute_saved_activations", "get_rng_state_tracker")}
    refuse("checkpoint", asked)
    context, recipe = current(), autocast_recipe()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), replayed(context, recipe)

    return torch_checkpoint(partial(function, **kwargs), *args, use_reentrant=False, context_fn=contexts)


class Fp8Padding(torch.nn.Module):
    """Rows of zeros after each member's rows, to a multiple of align_size.

    align_size: by default the recipe's of the first call: 32 for MXFP8BlockScaling, 128 for NVFP4BlockScaling,
    CustomRecipe's quantization_alignment, and 16 for other built-in recipes.
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def padded(self, m_splits: Sequence[int]) -> list[int]:
        """Each member's rows after padding. UserError for another number of members, and outside of an autocast without
        align_size."""
        if len(m_splits) != self.num_gemms:
            raise UserError(f"{type(self).__name__}: {len(m_splits)} splits for {self.num_gemms} members")
        if self.align_size is None:
            recipe = autocast_recipe()
            if recipe is None:
                raise UserError(f"{type(self).__name__}: no autocast says to which multiple; give align_size")
            self.align_size = getattr(recipe, "quantization_alignment", 128)
        return [-(-rows // self.align_size) * self.align_size for rows in m_splits]

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, list[int]]:
        """inp [sum of m_splits, ..., features] with padding, and its splits."""
        padded = self.padded(m_splits)
        if padded == list(m_splits):
            return inp, list(m_splits)
        parts = inp.split(list(m_splits))
        fill = [part.new_zeros(wide - len(part), *part.shape[1:]) for part, wide in zip(parts, padded, strict=True)]
        return torch.cat([each for pair in zip(parts, fill, strict=True) for each in pair]), padded


class Fp8Unpadding(Fp8Padding):
    """The inverse of Fp8Padding."""

    def forward(self, inp: Tensor, m_splits: Sequence[int]) -> Tensor:
        """inp without the padding; m_splits: each member's rows before padding."""
        padded = self.padded(m_splits)
        if padded == list(m_splits):
            return inp
        return torch.cat([part[:rows] for part, rows in zip(inp.split(padded), m_splits, strict=True)])
