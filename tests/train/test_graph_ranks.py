"""Steps over several ranks as graphs: the bits of eager steps, and eager steps after a capture that fails."""

import pytest
import torch
from support.parallel import graph_ranks as ranks
from support.ranks import BACKENDS, run_ranks
from support.train.graph_cases import CASES, config
from torch.utils._pytree import tree_leaves

pytestmark = pytest.mark.slow

TWO = {"dp_shard": 2}
SHARED = {
    "mxfp8": TWO,
    "nvfp4": TWO,
    "delayed": TWO,
    "stages": TWO,
    "microbatches": TWO,
    "held": TWO,
    "held delayed": TWO,
    "recompute": TWO,
    "experts": TWO,
    "bf16": {"dp_replicate": 2},
    "decoded": {"tp": 2},
    "experts, apart": {"dp_shard": 2, "ep": 2, "expert_room": 2},
    "codes of experts": {"dp_shard": 2, "ep": 2, "expert_room": 2},
}
"""Case -> the axes of its ranks."""
FEW = ("stages", "held delayed", "experts", "decoded", "experts, apart")
"""On the CPU, where the stand-in for graphs shows what Python does."""


def assert_same(one, other):
    """Steps and states to the byte."""
    assert one[0] == other[0]
    leaves, others = (tree_leaves(state) for state in (one[1], other[1]))
    assert len(leaves) == len(others)
    for a, b in zip(leaves, others, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def configs(cases, backend):
    """On the CPU of a few steps, unless the recipe changes amid them."""
    short = {case: {"steps": 6} for case in cases if backend == "gloo" and case != "stages"}
    return [
        config(_plain(case), dim=64 if "tp" in SHARED[case] else 32, parallel=SHARED[case], **short.get(case, {}))
        for case in cases
    ]


def _plain(case):
    """The case in one process."""
    return case.split(",")[0]


@pytest.mark.feature("H15")
@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_are_those_of_eager_steps(backend):
    assert set(map(_plain, SHARED)) == set(CASES) - {"delayed microbatches"}
    cases = FEW if backend == "gloo" else list(SHARED)
    for runs in run_ranks(2, ranks.train_both, configs(cases, backend), "graph", backend=backend):
        for case, (eager, graphed) in zip(cases, runs, strict=True):
            assert_same(eager, graphed)
            assert graphed[2] is None or backend == "gloo", (case, graphed[2])
            assert graphed[3], case


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_go_on_eagerly_after_a_capture_that_fails(backend):
    for runs in run_ranks(2, ranks.train_both, configs(["held", "microbatches"], backend), "failing", backend=backend):
        for eager, failed in runs:
            assert_same(eager, failed)
            assert "not today" in failed[2]
