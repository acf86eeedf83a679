"""TransformerEngine's GroupedLinear, called as it is called there."""

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from hqsweep.compat import CustomRecipe, DType, GroupedLinear, GroupedTensor, MXFP8Quantizer, autocast
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
    with pytest.raises(UserError, match="GroupedLinear: ub_overlap_ag=True, tp_size=2 has no counterpart here"):
        GroupedLinear(2, 32, 32, ub_overlap_ag=True, tp_size=2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_of_tensor_parallelism_has_one_rank(ranks):
    group = ProcessGroup(0, ranks)
    if ranks == 1:
        GroupedLinear(2, 32, 32, tp_group=group, tp_size=1, sequence_parallel=True)
        return
    with pytest.raises(UserError, match="GroupedLinear: tp_group of size=2 has no counterpart here"):
        GroupedLinear(2, 32, 32, tp_group=group, sequence_parallel=True, parallel_mode="column")
