"""Linears shared over ranks: to the byte what one process computes, or a sum that is split as theirs."""

import pytest
import torch
from cases import HYBRID, QUANTIZERS, SOME, first
from support.parallel import compat_held, shared_linears, shared_models
from support.ranks import BACKENDS, run_ranks

from hqsweep.ops.attention import has_cudnn

REFUSALS = [
    "l: 97 output features do not divide by tp=2",
    "l: grad_output: a rank's part has 24 columns of (32, 24), which cut a block of mxfp8; take sizes whose parts are"
    " multiples of 32, or fewer ranks",
    "l: its weight lies over ranks already",
    "l: its norm reads whole rows, of which RowwiseLinear has parts",
    "Linear: the style takes hqsweep.nn.Linear, and got torch.nn.modules.linear.Linear",
    "l: a rank's part has 24 rows of (24, 64), which cut a block of mxfp8; take sizes whose parts are multiples of 32,"
    " or fewer ranks",
]


@pytest.fixture(scope="module")
def both():
    """What each rank returned, of this package's linears and of TransformerEngine's that are held, and its experts."""
    return run_ranks(2, compat_held.everything, 2, QUANTIZERS, [*SOME, first(delayed=True)])


@pytest.fixture(scope="module")
def of_two_ranks(both):
    """What each rank returned: differences, refusals, main gradients."""
    return list(zip(*(shared for shared, _ in both), strict=True))


@pytest.fixture(scope="module")
def held_by_two_ranks(both):
    return list(zip(*(held for _, held in both), strict=True))


@pytest.mark.slow
def test_linears_over_two_ranks_are_those_of_one_process(of_two_ranks):
    assert of_two_ranks[0] == ([], [])


@pytest.mark.slow
def test_what_ranks_cannot_share(of_two_ranks):
    assert of_two_ranks[1] == (REFUSALS, REFUSALS)


@pytest.mark.slow
def test_main_grad_of_a_part_is_that_part_of_the_whole(of_two_ranks):
    for part, whole, told in of_two_ranks[2]:
        assert torch.equal(part, whole) and part.any() and told


@pytest.mark.slow
def test_tokens_travel_as_codes_where_that_takes_fewer_bytes(of_two_ranks):
    """Codes of x travel rowwise in forward and columnwise in backward, those of dy both at once."""
    first, second = of_two_ranks[3]
    assert first == second
    assert {name: tuple(round(x, 2) for x in each) for name, each in first.items()} == {
        "bf16 ColwiseLinear": (2.0, 2.0),
        "bf16 RowwiseLinear": (0.0, 2.0),
        "mxfp8 ColwiseLinear": (1.03, 1.03),
        "mxfp8 RowwiseLinear": (0.0, 2.0),
        "nvfp4 ColwiseLinear": (0.56, 0.56),
        "nvfp4 RowwiseLinear": (0.0, 1.12),
        "fp8_block ColwiseLinear": (2.0, 0.0),  # a part of 64 tokens cuts blocks of 128
        "fp8_block RowwiseLinear": (0.0, 2.0),
    }


@pytest.mark.feature("F119")
@pytest.mark.slow
def test_linears_by_the_names_of_transformer_engine(of_two_ranks):
    assert of_two_ranks[4][0] == of_two_ranks[4][1]
    assert of_two_ranks[4][0] == [
        "Linear: in_features=33 does not divide by tp_size=2",
        "Linear: tp_size=2 without a parallel_mode; give 'column' or 'row'",
        "Linear: ub_overlap_ag=True has no counterpart here; leave it out",
        "Linear: parallel_mode is 'both'; it takes 'column', 'row' or None",
    ]


@pytest.mark.feature("F119")
@pytest.mark.slow
def test_layers_by_the_names_of_transformer_engine(of_two_ranks):
    assert of_two_ranks[5] == ([], [])


@pytest.mark.feature("F119")
@pytest.mark.slow
def test_held_parts_by_the_names_of_transformer_engine(held_by_two_ranks):
    """Built with the group or before it, trained, loaded, and written from masters, as those of one process."""
    assert held_by_two_ranks[0] == ([], [])


@pytest.mark.feature("F119")
@pytest.mark.slow
def test_experts_by_the_names_of_transformer_engine(held_by_two_ranks):
    """In formats that scale by the whole matrix of an expert, or draw random bits by its place in it."""
    assert held_by_two_ranks[1] == ([], [])


@pytest.mark.slow
def test_held_parts_that_cut_a_block_are_refused(held_by_two_ranks):
    sentence = (
        "m: weight: a rank's part has 48 columns of (64, 48), which cut a block of mxfp8; take sizes whose parts are"
        " multiples of 32, or fewer ranks"
    )
    assert held_by_two_ranks[2] == ([sentence] * 2,) * 2


@pytest.mark.slow
def test_held_weights_that_are_moved_keep_their_states(of_two_ranks):
    assert of_two_ranks[6] == (True, True)


@pytest.mark.slow
def test_no_tokens_are_gathered_and_summed(of_two_ranks):
    assert of_two_ranks[7] == ([(0, 16)] * 4,) * 2


MODELS = [
    {"recipe": {"linear": "bf16"}, "sequence": False},
    {"recipe": {"linear": "nvfp4+sr|nvfp4+sr@rowwise_dequantized", "embedding": "nvfp4+sr"}, "axis": 0},
    {"recipe": {"linear": "nvfp4|mxfp8@rowwise_dequantized", "dpa": "fp8_current", "embedding": "fp8_current"}},
    {"recipe": {"linear": "fp8_delayed", "dpa": "nvfp4"}, "steps": 2, "layers": 2},
    {"recipe": {"linear": "nvfp4+sr|nvfp4+sr@rowwise_dequantized", "dpa": "nvfp4+sr", "embedding": "nvfp4+sr"}},
]
NVFP4 = {"input": "nvfp4|nvfp4+rht", "weight": "nvfp4+2d", "grad_output": "nvfp4+sr|nvfp4+rht+sr"}
FP8 = {"input": "fp8_current|fp8_delayed@rowwise_dequantized", "weight": "fp8_current",
       "grad_output": "fp8_delayed|fp8_current@rowwise_dequantized"}  # fmt: skip
ROWS = {"input": "nvfp4+row_scaled|mxfp8", "weight": "nvfp4+row_scaled|mxfp8", "grad_output": "mxfp8"}
MIXTURES = [
    {"recipe": {"linear": "bf16"}, "sequence": False, "shared_expert": True, "tied": True},
    {"recipe": {"linear": "bf16", "grouped_linear": ROWS}, "shared_expert": True, "axis": 0},
    {"recipe": {"linear": "bf16", "grouped_linear": NVFP4}, "experts": 32, "top_k": 1},
    {"recipe": {"linear": "bf16", "grouped_linear": FP8}, "steps": 2},
]
"""Of 32 experts some have no tokens."""
UNSHARED = [
    "layers.0.attn.qkv: 1 heads do not divide by tp=2",
    "layers.0.mlp.fc1: 97 output features do not divide by tp=2",
    "layers.0.mlp.fc2: 97 input features of each expert do not divide by tp=2",
    "layers.0.mlp.fc1: a rank's part has 48 rows of (96, 128), which cut a block of mxfp8; take sizes whose parts are"
    " multiples of 32, or fewer ranks",
    "layers.0.mlp: its experts are cut over 'tp'; expert_parallel takes a mesh with that axis beside 'ep'",
    "layers.0.mlp: its experts lie over ranks already; tensor_parallel comes first",
    "tensor_parallel: the mesh has axes ('dp', 'cp'); it takes one that is named 'tp', or one axis",
    "tensor_parallel: Linear has no module of hqsweep.nn that ranks can share",
    "a sequence of 3 tokens does not divide by tp=2",
    "a batch of 3 sequences does not divide by tp=2",
    "tensor_parallel: axis is 2; tokens of x [B, T, D] lie split along 1, or sequences along 0",
]


@pytest.mark.slow
def test_models_over_two_ranks_have_the_bytes_of_sums_that_are_split():
    assert run_ranks(2, shared_models.everything, 2, MODELS) == [([], UNSHARED, [])] * 2


@pytest.mark.feature("H19")
@pytest.mark.slow
def test_mixtures_over_two_ranks_have_the_bytes_of_sums_that_are_split():
    assert run_ranks(2, shared_models.mixtures, 2, [{"experts": 4} | case for case in MIXTURES]) == [([], True)] * 2


FUSED = {
    "mxfp8": True,
    "bf16": True,
    "mxfp8|bf16": True,
    "nvfp4|mxfp8@rowwise_dequantized": False,
    "nvfp4+row_scaled|mxfp8": False,
}
"""Format of all tensors -> whether a rank quantizes its part of an activation alone."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_mlps_and_losses_are_fused_as_in_one_process(backend):
    """Of whole sequences on each rank the activation comes in turn: first that of the other rank."""
    for results in run_ranks(2, shared_models.fused, 2, list(FUSED), backend=backend):
        for (text, alone), result in zip(FUSED.items(), results, strict=True):
            assert result == ({alone}, [0, 2 * alone], [], []), text


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_that_norms_read_are_those_of_a_pass_of_their_own(backend):
    """Of each layer two in forward, which runs again where layers are recomputed, and two in backward. Nothing of a
    forward keeps them. Norms send the gradients of the first two, but for a layer's own that is computed again, and
    weights get those of the others behind the norms."""
    recipes = ["mxfp8", "bf16", "nvfp4+row_scaled|mxfp8"]
    for results in run_ranks(2, shared_models.left_sums, 2, recipes, backend=backend):
        assert results == [([8, 0, 4, 4], []), ([12, 0, 2, 4], [])] * 3


@pytest.mark.slow
def test_sums_are_left_under_fully_shard_too():
    assert run_ranks(4, shared_models.left_under_fsdp, 4) == [([8, 0, 4, 4], [])] * 4


@pytest.mark.gpu2
def test_what_comes_in_turn_has_the_bits_of_the_whole(monkeypatch):
    """Attention and activation of two layers, of two ranks' sequences each; nvfp4 has a scale of the whole. Without
    cuDNN's frontend attention comes as a whole."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    attention = 4 if has_cudnn() else 0
    for results in run_ranks(2, shared_models.turned, 2, ["bf16", "mxfp8", "mxfp8|bf16", "nvfp4"], backend="nccl"):
        assert results == [([4 + attention, 0], [])] * 3 + [([0, 0], [])]


@pytest.mark.slow
def test_models_over_four_ranks():
    assert run_ranks(4, shared_models.compare, 4, [{"recipe": {"linear": "mxfp8"}, "tied": True}]) == [[]] * 4


@pytest.mark.slow
def test_sums_of_four_ranks_are_in_their_order():
    texts = ["bf16", "fp8_current", "nvfp4", HYBRID]
    assert run_ranks(4, shared_linears.differences, 4, texts) == [[]] * 4
