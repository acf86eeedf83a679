"""fully_shard of held weights: gathered to the byte for every format and pair, trained as in one process, and what is
sent and kept is what the pass reads."""

import pytest
from cases import FEW, SAME, STATELESS
from support.parallel.fsdp2_once import SQUARE, once
from support.parallel.fsdp2_ranks import gathered
from support.parallel.fsdp2_training import (
    CASES,
    HELD_MESH_CASES,
    HYBRID_CASES,
    MESH_CASES,
    PLAIN_CASES,
    offloaded,
    plainly_trained,
    trained,
)
from support.parallel.fsdp2_uses import compiled, uses
from support.parallel.fsdp2_wire import memory, plain, sent, trained_on_four
from support.ranks import BACKENDS, run_ranks

from hqsweep.parallel import mesh

pytestmark = pytest.mark.slow

TEXTS = [*(text for text in STATELESS if text in SAME), *FEW[-2:]]
"""Each format in both directions, and two pairs: a plane is gathered by itself, whatever the other one is."""
EVEN = [(256, 96), (4, 48, 32)]
CUT = [(32, 32), (272, 32), (4, 32), (2, 16, 32)]
"""Parts that cut blocks, and nibbles; of other sizes than the first, and empty."""
OTHERS = [((48, 96), 1), ((32, 48), 1), ((3, 64, 32), 1), ((2, 32, 96), 2), ((3, 32, 64), 2)]
"""Cut along another axis than the first: also into parts that cut blocks of 32, and of 16."""


@pytest.mark.feature("F101", "F102", "F103", "F104", "F108", "F114", "H8")
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_ranks_gather_is_the_whole(backend):
    assert run_ranks(2, gathered, TEXTS, EVEN + CUT[:1], OTHERS, backend=backend) == [{}, {}]


@pytest.mark.feature("F101", "F102", "F103", "F104", "F108", "F114")
def test_cuts_inside_blocks():
    assert run_ranks(3, gathered, TEXTS, CUT, [((32, 192), 1), ((2, 96, 32), 1)]) == [{}, {}, {}]


@pytest.mark.feature("F110", "F111")
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_train_as_one_process(backend):
    """However torch shards, recomputes and accumulates: every pass reads operands that are there."""
    names = [name for name in CASES if backend == "gloo" or name != "offloads"]  # collectives of tensors on the CPU
    assert run_ranks(2, trained, ["nvfp4|mxfp8@rowwise_dequantized"], names, backend=backend) == [{}, {}]


@pytest.mark.gpu2
def test_shards_on_the_cpu_are_gathered_on_gpus():
    """CPUOffloadPolicy: gloo serves what ranks exchange of shards, and NCCL what they gather."""
    texts = ["nvfp4|mxfp8@rowwise_dequantized", "fp8_current", "mxfp8+2d"]
    assert run_ranks(2, offloaded, texts, backend=mesh.backend("cuda")) == [{}, {}]


@pytest.mark.feature("H12")
@pytest.mark.parametrize("backend", BACKENDS)
def test_plain_weights_train_as_in_one_process(backend):
    """Though they travel in the dtype of their linear, and are given up as soon as they are quantized."""
    names = [name for name in PLAIN_CASES if backend == "gloo" or name != "offloads"]
    assert run_ranks(2, plainly_trained, names, backend=backend) == [{}, {}]


@pytest.mark.feature("F110", "F111")
@pytest.mark.parametrize("backend", BACKENDS)
def test_formats_train_as_in_one_process(backend):
    texts = ["fp8_current", "fp8_delayed", "nvfp4+sr", "nvfp4+2d|fp8_block+2d"]
    assert run_ranks(2, trained, texts, ["reshards", "by columns"], backend=backend) == [{}, {}]


@pytest.mark.feature("H8")
def test_hybrid_shards_train_as_one_process():
    """Shards of one rank, too: nothing is gathered there. Also with a number of ranks, over which weights lie between
    forward and backward: forward gathers both directions of held ones, and backward its own from these ranks."""
    held_names = [*HYBRID_CASES, *MESH_CASES, *(name for name in HELD_MESH_CASES if name != "by columns")]
    names = ["shards of two ranks", *MESH_CASES]
    for held, of_plain, gathers in run_ranks(4, trained_on_four, "nvfp4|mxfp8", held_names, names):
        assert held == of_plain == {}
        row, column = PLANES["nvfp4|mxfp8"]
        both = row + column
        assert gathers == pytest.approx([both, column, both, 0, column], abs=3e-4)  # forward, backward, evaluation, ...


PLANES = {
    "nvfp4|mxfp8": (0.5626, 1.0312),
    "mxfp8|nvfp4": (1.0312, 0.5626),
    "bf16": (2.0, 2.0),
}
"""Bytes an element of the rowwise operand, and of the columnwise one."""


@pytest.mark.feature("F112", "H10")
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_pass_sends_the_plane_that_it_reads(backend):
    ranks = run_ranks(2, sent, list(PLANES), backend=backend)
    for text, (row, column) in PLANES.items():
        both = row if text == "bf16" else round(row + column, 4)
        wanted = {
            "reshards": [row, column] * 2,
            "keeps": [both] * 2,
            "recomputes": [row, column, row, both],  # the first backward lacks the rows, and gathers them on the spot
            "evaluates": [row] * 2,
            "accumulates": [row, both, column] * 2,
            "converted": [row, column] * 2,
        }
        for cases in (of_rank[text] for of_rank in ranks):
            assert cases.keys() == wanted.keys()
            for case in cases:
                assert cases[case] == pytest.approx(wanted[case], abs=2e-4), (text, case)


PLAIN = {
    "mxfp8": 1.0312,
    "nvfp4+2d": 0.504,
    "nvfp4|mxfp8": 1.0312,
    "bf16": 2.0,
    "fp8_delayed": 2.0,
}
"""Bytes an element of what is kept of a plain weight for backward, where that is in one gather with forward."""


@pytest.mark.feature("H12")
@pytest.mark.parametrize("backend", BACKENDS)
def test_plain_weights_travel_in_bf16_and_are_kept_as_codes(backend):
    """Two bytes an element each way; what is kept for backward is what that reads."""
    for text, cases in run_ranks(2, plain, list(PLAIN), backend=backend)[0].items():
        wanted = {
            "reshards": ([2.0] * 4, [0, 0]),
            "keeps": ([2.0] * 2, [PLAIN[text], 0]),
            "recomputes": ([2.0] * 4, [0, 0]),
            "evaluates": ([2.0] * 2, [0, 0]),
        }
        assert cases == {name: (sent, pytest.approx(left, abs=2e-4)) for name, (sent, left) in wanted.items()}, text


QUANTIZATIONS = {
    "keeps": [1, 1],
    "keeps experts in parameters of their own": [1, 1],
    "keeps, of data without gradients": [1, 1],
    "keeps and accumulates": [1, 1],
    "keeps and recomputes": [2, 1],  # the first backward lacks the rows, and gathers the values once more
    "reshards": [2, 2],
    "reshards and accumulates": [4, 4],  # in each backward both directions, of which the next forward reads the rows
}
"""How often a plain weight is quantized in each of two steps, in every format."""


@pytest.mark.feature("H12")
@pytest.mark.parametrize(
    ("texts", "cases"),
    [(["nvfp4+2d", "mxfp8"], list(QUANTIZATIONS)), ([*SQUARE[1:], "nvfp4+2d+sr"], ["keeps", "reshards"])],
)
def test_plain_weights_are_quantized_once_of_each_gather(texts, cases):
    """In both directions where backward follows in that gather, and their values are free once forward has run. What
    products read, outputs and gradients are those of one process."""
    for counts, faults in run_ranks(2, once, texts, cases):
        assert counts == {(text, case): [{n} for n in QUANTIZATIONS[case]] for text in texts for case in cases}
        assert faults == []


@pytest.mark.feature("F115")
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_is_that_of_the_plane_in_use(backend):
    step = [[0, 0.5626], [0, 1.0312], [0, 0]]  # the second block's forward, its backward, the end of a step
    assert run_ranks(2, memory, "nvfp4|mxfp8", backend=backend) == [step * 3] * 2


@pytest.mark.feature("H10", "H12")
@pytest.mark.parametrize("backend", BACKENDS)
def test_policies_states_the_meta_device_and_converted_models(backend):
    wanted = {
        "policy": ("torch.bfloat16", "torch.float32", True),
        "plain_policy": ("torch.bfloat16", "torch.float32", [0]),
        "ignored": ("HybridQuantizedTensor", True, "DTensor"),
        "plain_ignored": ("Tensor", True, "DTensor"),
        "states": [],
        "on_meta": [],
        "converted": True,
        "held_llama": (True, pytest.approx(1.0312, abs=2e-4)),
        "held_policy": True,
    }
    assert run_ranks(2, uses, backend=backend) == [wanted] * 2


def test_compiled_blocks_train_as_eager_ones():
    """Products of held weights stand between graphs; blocks of plain ones are one graph, which both share."""
    results = run_ranks(2, compiled)
    assert all(same and differing == [] for cases in results for same, differing, *_ in cases)
    (*_, graphs, _), (*_, of_plain, breaks) = results[0]
    assert graphs > 0 and (of_plain, breaks) == (1, 0)
