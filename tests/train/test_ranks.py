"""Trainings over several ranks against the training in one process with as many microbatches."""

from itertools import chain

import pytest
import torch
from cases import DELAYED_IN_PARTS, LINEARS
from support.parallel import training_ranks as ranks
from support.ranks import backend as backend
from support.ranks import run_ranks

from hqsweep.quant import HybridQuantizedTensor

pytestmark = pytest.mark.slow

NVFP4 = LINEARS["nvfp4"]
DELAYED = DELAYED_IN_PARTS
TWO = {"parallel": {"dp_shard": 2}}
LAYER = {"recompute": "layer", "microbatches": 2}
HELD = TWO | {"model": {"quantized_weights": True}}
EXACT = [
    ("bf16", TWO),
    ("mxfp8", TWO),
    (NVFP4, TWO),
    ("fp8_current", TWO),
    (DELAYED, TWO),
    ({"linear": "mxfp8", "head": "mxfp8"}, HELD | {"eval_every": 1}),
    (NVFP4, HELD),
    ("mxfp8", TWO | {"offload": True}),
    (NVFP4, HELD | {"offload": True, "recompute": "attention"}),
]
CLOSE = [("mxfp8", TWO | LAYER), (NVFP4, {"parallel": {"dp_replicate": 2}})]
COUNTED = [TWO | {"steps": 3, "eval_every": 9, "eval_batches": 3, "recompute": part} for part in ("none", "layer")]
SHARED = ("mxfp8", {"parallel": {"tp": 2}})
OFFLOADED = [(linear, changes | {"offload": True}) for linear, changes in (CLOSE[1], SHARED)]


@pytest.fixture(scope="module")
def launched(backend):
    """What both ranks return of all cases, and of those that are counted; they are launched once."""
    cases = [*EXACT, *CLOSE, SHARED, *OFFLOADED]
    return run_ranks(2, ranks.train_all, cases, [("mxfp8", changes) for changes in COUNTED], backend=backend)


@pytest.fixture(scope="module")
def results(launched):
    """What both ranks return of all cases."""
    return [trained for trained, _ in launched]


def alone(linear, changes):
    """The same in one process, whose microbatches are those of both ranks."""
    one = {key: value for key, value in changes.items() if key != "parallel"}
    return ranks.train(ranks.config(linear, **one | {"microbatches": 2 * one.get("microbatches", 1)}))


def values(weight):
    """The values of a weight, also of one that is held as operands."""
    return weight.dequantize() if isinstance(weight, HybridQuantizedTensor) else weight


def assert_close_rows(got, expected, rel):
    """Statistics of steps, about the same things in the same order."""
    for own, wanted in zip(chain(*got), chain(*expected), strict=True):
        assert list(own.values())[:5] == list(wanted.values())[:5]
        ratios = {name: wanted[name] for name in ("sqnr_db", "cosine")}
        assert {name: own[name] for name in ratios} == pytest.approx(ratios, rel=rel)


@pytest.mark.parametrize("case", range(len(EXACT)))
def test_two_ranks_are_two_microbatches(results, case):
    """Losses, weights and moments to the byte, since a sum of two has one order; the norm of the gradients is a sum
    over more parts."""
    metrics, stats, state = alone(*EXACT[case])
    for theirs, _, own in (each[case] for each in results):
        for step, expected in zip(theirs, metrics, strict=True):
            assert step.pop("grad_norm") == pytest.approx(expected["grad_norm"], rel=1e-6)
            assert step == {name: value for name, value in expected.items() if name != "grad_norm"}
        for name, value in state["model"].items():
            assert torch.equal(values(own["model"][name]), values(value)), name
        for index, moments in state["optimizer"]["state"].items():
            assert all(torch.equal(own["optimizer"]["state"][index][name], v) for name, v in moments.items())
    assert [each[case][1] for each in results] == [stats, [[]] * len(stats)]
    assert {row["step"] for rows in stats for row in rows} == {2}


@pytest.mark.parametrize("case", range(len(CLOSE)))
def test_sums_in_another_order_stay_close(results, case):
    metrics, stats, state = alone(*CLOSE[case])
    assert_close_rows(results[0][len(EXACT) + case][1], stats, rel=1e-2)
    for theirs, _, own in (each[len(EXACT) + case] for each in results):
        for step, expected in zip(theirs, metrics, strict=True):
            assert step == pytest.approx(expected, rel=1e-5)
        for name, value in state["model"].items():
            assert torch.allclose(own["model"][name], value, rtol=1e-3, atol=2e-5), name


@pytest.mark.feature("H25")
def test_layers_that_are_computed_again_are_gathered_as_often(launched):
    """Once in forward, and once in backward for what runs again and for gradients. The last step is evaluated, too."""
    for _, counts in launched:
        assert counts == [[(2, 0), (2, 0), (4, 0)]] * 2


def test_shared_matrices_stay_close(results):
    """Parts of products are rounded before their sum, and Adam's first steps take signs of gradients that are noise."""
    metrics, stats, _ = ranks.train(ranks.config(SHARED[0]))
    (own, rows, _), (other, _, _) = (each[len(EXACT) + len(CLOSE)] for each in results)
    assert_close_rows(rows, stats, rel=0.1)
    assert own == other
    for index, (step, expected) in enumerate(zip(own, metrics, strict=True)):
        norm = step["grad_norm"]
        assert norm == pytest.approx(expected["grad_norm"], rel=2e-2 if index else 2e-3)
        assert step == pytest.approx(expected | {"grad_norm": norm}, rel=2e-4)


@pytest.mark.feature("F123", "F161")
def test_offloading_changes_no_byte_over_other_axes(results):
    """Over copies, and over parts of matrices."""
    for each in results:
        for (metrics, stats, state), (other, rows, whole) in zip(each[-4:-2], each[-2:], strict=True):
            assert metrics == other and stats == rows
            for name, value in state["model"].items():
                assert torch.equal(whole["model"][name], value), name


def test_a_training_goes_on_from_its_checkpoint(tmp_path, backend):
    for results in run_ranks(2, ranks.resume_all, tmp_path, [TWO, HELD, SHARED[1]], backend=backend):
        assert all(through == again for through, again in results)
