"""FusedAdam over ranks: under fully_shard it is one process with the means of the gradients of the ranks' slices."""

import pytest
import torch
from support.parallel.optim_ranks import (
    CASES,
    MAIN_GRADS,
    ONE_ROW,
    RANKS,
    STEPS,
    held,
    main_grads_of_one_process,
    of_one_row,
    one_process,
    run,
)
from support.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(RANKS, run)


def differences(a, b):
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("case", CASES)
def test_shards_are_updated_as_in_one_process(case, ranks):
    """Masters, moments and parameters after every step, to the byte, on every rank."""
    expected = one_process(case)
    for seen in ranks:
        for step in range(1, STEPS + 1):
            assert not differences(expected[step], seen[case, step]), step


@pytest.mark.parametrize("text", ONE_ROW)
def test_a_held_weight_of_one_row_is_that_of_the_first_rank(text, ranks):
    """The others have none of it, and nothing to exchange."""
    assert [seen[text] for seen in ranks] == [of_one_row(text, sharded=False)] * RANKS


@pytest.mark.parametrize("case", CASES)
def test_each_rank_holds_its_part_of_the_state(case, ranks):
    outputs = CASES[case][3]
    parts = [[shape[0] for shape in seen[case, "parts"]] for seen in ranks]
    assert parts == [[48, outputs - 16], [48, 16]]


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_training_of_shards_is_the_uninterrupted_one(case, ranks):
    for seen in ranks:
        assert not differences(seen[case, STEPS], seen[case, "resumed"])


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_clipped_by_the_norm_over_all_ranks(case, ranks):
    """The first step clips and the second leaves what is clipped; sums of squares are in another order."""
    expected = one_process(case)
    for seen in ranks:
        for norm, own in zip(expected["norm"], seen[case, "norm"], strict=True):
            assert type(own) is torch.Tensor and own.shape == ()
            torch.testing.assert_close(own.float(), norm.float(), rtol=1e-2 if case == "bfloat16" else 1e-5, atol=0)
        assert torch.equal(seen[case, "norm"][0], ranks[0][case, "norm"][0])
        for name, tensor in expected["clipped"].items():
            torch.testing.assert_close(seen[case, "clipped"][name], tensor, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("case", MAIN_GRADS)
def test_main_grads_are_fp32_sums_of_all_ranks(case, ranks):
    """They add up unrounded results of wgrad to the byte, for parameters that are gathered or kept in bfloat16, too."""
    expected = main_grads_of_one_process(case)
    for seen in (seen["main_grads"] for seen in ranks):
        for part in (1, 2, "weights"):
            for tensor, own in zip(expected[part], seen[case, part], strict=True):
                assert tensor.dtype == own.dtype and torch.equal(tensor, own), part
        assert seen[case, "grads"] == [None] * 3


def test_main_grads_that_ranks_do_not_share_are_refused(ranks):
    for seen in ranks:
        assert (
            "give it the model that DistributedDataParallel or fully_shard has made"
            in seen["main_grads"]["wrapped later"]
        )


def test_main_grads_of_rounded_reductions_are_refused(ranks):
    for seen in ranks:
        assert (
            "of a parameter [96] in its dtype, bfloat16, and FP32 sums of them would be of rounded ones"
            in (seen["main_grads"]["rounded"])
        )


@pytest.mark.parametrize("bias", [False, True])
def test_ddp_gives_all_ranks_the_held_weights_of_the_first(bias, ranks):
    """Operands of both directions and the preserved initial value, and not its decoded values quantized once more;
    also where the weight is all that is broadcast."""
    weight = held(0, bias)[0].weight
    expected = dict(weight.buffers) | {"initial": weight.get_high_precision_init_val()}
    for seen in ranks:
        own = seen["main_grads"]["held", bias]
        assert own.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(own[name], expected[name])] == []
