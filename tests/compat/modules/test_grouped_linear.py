"""TransformerEngine's GroupedLinear, called as it is called there."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from hqsweep.compat import (
    CustomRecipe,
    DType,
    GroupedLinear,
    GroupedTensor,
    MXFP8Quantizer,
    autocast,
)
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.nn import GroupedLinear as Ours
from hqsweep.nn import quantized_model_init
from hqsweep.recipe import parse_recipe


def mxfp8(role):
    return MXFP8Quantizer(DType.kFloat8E4M3)


def filled(weight):
    nn.init.constant_(weight, 0.5)


def test_it_is_ours_under_their_names():
    torch.manual_seed(0)
    theirs = GroupedLinear(3, 32, 48, bias=False, name="experts", device="cpu", save_original_input=True)
    torch.manual_seed(0)
    ours = Ours(3, 32, 48, name="experts", recipe=parse_recipe({"linear": "mxfp8"}))
    x = draw("normal", 24, 32)
    with autocast(enabled=True, recipe=CustomRecipe(qfactory=mxfp8)):
        y = theirs(x, m_splits=[8, 0, 16], is_first_microbatch=True)
    assert torch.equal(y, ours(x, [8, 0, 16])) and theirs.num_gemms == 3
    assert list(dict(theirs.named_parameters())) == ["weight0", "weight1", "weight2"]
    assert not torch.equal(theirs(x, [8, 0, 16]), y)  # high precision outside of autocast


@pytest.mark.parametrize("held", [False, True])
def test_options(held):
    options = {"params_dtype": torch.bfloat16, "init_method": filled, "parallel_mode": "row"}
    with quantized_model_init(enabled=held):
        module = GroupedLinear(2, 32, 48, **options, single_grouped_weight=True, single_grouped_bias=True)
    assert module.weight.dtype == module.bias.dtype == torch.bfloat16 and module.bias.shape == (2, 48)
    assert torch.equal(module.weight + 0, torch.full((2, 48, 32), 0.5, dtype=torch.bfloat16))
    assert module.weight.partition_dim == 2 and isinstance(module.weight, GroupedTensor) == held


def test_what_would_change_a_number_and_is_not_here_is_refused():
    with pytest.raises(UserError, match="GroupedLinear: ub_overlap_ag=True has no counterpart here"):
        GroupedLinear(2, 32, 32, ub_overlap_ag=True)


def passed(module, x, dy):
    """y and the gradients of x and of the weights."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    with autocast(recipe=CustomRecipe(qfactory=mxfp8)):
        y = module(x, [64, 0, 32])
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.feature("F119")
@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("later", [False, True])
def test_a_rank_has_its_part_of_the_experts_and_exchanges_nothing(mode, later):
    """To the byte what the whole has of it; what ranks split is a sum of what each returns."""

    def build(**options):
        torch.manual_seed(0)
        return GroupedLinear(3, 64, 128, bias=False, init_method=nn.init.xavier_normal_, **options)

    x, dy, sums = draw("normal", 96, 64), draw("normal", 96, 128, 1), []
    whole = passed(build(tp_group=ProcessGroup(0, 1)), x, dy)
    for rank in range(2):
        group = {} if later else {"tp_group": ProcessGroup(rank, 2)}
        own = build(parallel_mode=mode, tp_size=2, sequence_parallel=True, **group)
        if later:
            torch.manual_seed(0)
            own.set_tensor_parallel_group(ProcessGroup(rank, 2))
        cut = {"column": (None, 1), "row": (1, None)}[mode]
        own_x, own_dy = (t if axis is None else t.chunk(2, axis)[rank] for t, axis in zip((x, dy), cut, strict=True))
        results = passed(own, own_x, own_dy)
        axes = {"column": (1, None, 0, 0, 0), "row": (None, 1, 1, 1, 1)}[mode]
        for tensor, expected, axis in zip(results, whole, axes, strict=True):
            if axis is None:
                sums.append(tensor.float())
            else:
                assert torch.equal(tensor, expected.chunk(2, axis)[rank])
    summed = whole[axes.index(None)].float()
    assert (sums[0] + sums[1] - summed).norm() < 1e-2 * summed.norm()


REFUSED = {
    "tp_size=2 without a parallel_mode; give 'column' or 'row'": {"bias": False},
    "with tp_size=2 what it returns may be a part of a sum": {"parallel_mode": "row"},
    "out_features=33 does not divide by tp_size=2": {"bias": False, "parallel_mode": "column"},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_ranks_cannot_share_is_refused(sentence):
    with pytest.raises(UserError, match=sentence):
        GroupedLinear(2, 32, 33, tp_size=2, **REFUSED[sentence])


def test_parts_that_are_not_those_of_the_whole_are_refused():
    group, x = ProcessGroup(0, 2), draw("normal", 32, 64)
    with pytest.raises(UserError, match="a tp_group of 2 ranks, where tp_size is 3"):
        GroupedLinear(2, 32, 33, bias=False, parallel_mode="column", tp_size=3).set_tensor_parallel_group(group)
    with pytest.raises(UserError, match="experts: tp_size=2, and no tp_group says which ranks these are"):
        GroupedLinear(2, 64, 64, bias=False, parallel_mode="row", tp_size=2, name="experts")(x, [32, 0])
    module = GroupedLinear(2, 64, 96, bias=False, parallel_mode="column", tp_group=group)
    with autocast(recipe=CustomRecipe(qfactory=mxfp8)):
        y = module(x.requires_grad_(), [32, 0])
    sentence = "grouped_linear: grad_output: a rank's part has 48 columns of .32, 48., which cut a block of mxfp8"
    with pytest.raises(UserError, match=sentence):
        y.sum().backward()


def test_experts_that_are_held_as_parts_stay_parts_and_are_cut_further():
    group = ProcessGroup(0, 2)
    with quantized_model_init(recipe="mxfp8"):
        module = GroupedLinear(
            2, 64, 64, bias=False, parallel_mode="row", tp_group=group, single_grouped_weight=True, name="e"
        )
    weight = module.weight.detach()
    kept = (copy.deepcopy(module).weight, weight.clone(), weight[:1], weight[1], *weight.unbind(), *weight.split(1))
    assert all(part.part is module.weight.part and part.part.axis == 1 for part in kept)
