"""Steps as a graph: the bits of eager steps, in every recipe and option, with what runs between them."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from support.train.graph_cases import CASES, config
from support.train.replayed import EagerPool

from hqsweep.errors import UserError
from hqsweep.jobs.isolation import make_deterministic
from hqsweep.nn.saved_memory import tensors_of
from hqsweep.ops import library
from hqsweep.quant.delayed import DelayedState
from hqsweep.quant.tensor import HybridQuantizedTensor
from hqsweep.train import data
from hqsweep.train.graph import GraphPool
from hqsweep.train.loop import Trainer

FAST = ("nvfp4", "delayed", "stages", "experts", "microbatches", "held")
"""One case of each way in which a step differs; `make test-fast` leaves the others out."""
cases = pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def deterministic(request):
    """On a GPU as runs are."""
    if request.node.get_closest_marker("gpu"):
        make_deterministic()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.utils.deterministic.fill_uninitialized_memory = True


def trainer(cfg, device, *, graph):
    training = Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), torch.device(device))
    if not graph:
        training.runner.pool = None
    elif device == "cpu":
        training.runner.pool = EagerPool(training)
    return training


def known(training):
    """All that a step leaves: tensors, and what Python remembers."""
    state = [value for each in training.optimizer.state.values() for value in each.values()]
    steps = [part.step for part in training.model.modules() if isinstance(part, DelayedState)]
    keys = [p.metadata.key for p in training.model.parameters() if isinstance(p, HybridQuantizedTensor)]
    assert all(key is None or key.counter is None for key in keys)
    return [tensor.detach().clone() for tensor in (*tensors_of(training.model), *state, training.loss_sum)], (
        steps,
        keys,
    )


def assert_same(one, other):
    (tensors, python), (others, others_python) = known(one), known(other)
    assert python == others_python and len(tensors) == len(others)
    assert all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


@pytest.mark.slow
@pytest.mark.feature("H7")
@devices
@cases
def test_bits_are_those_of_eager_steps(device, case):
    plain, graphed = (trainer(config(case), device, graph=graph) for graph in (False, True))
    for a, b in zip(plain.steps(), graphed.steps(), strict=True):
        assert (a.metrics, a.stats) == (b.metrics, b.stats), a.step
    assert_same(plain, graphed)
    if device == "cuda":
        assert graphed.runner.reason is None and graphed.runner.has_graph
    else:
        sampled = {"stages": [3, 3], "mxfp8": [8, 2], "nvfp4": [8, 2], "delayed": [8, 2]}
        assert graphed.runner.pool.replays == sampled.get(case, [10, 2])


@pytest.mark.feature("H7")
@devices
@pytest.mark.parametrize("case", ["stages", "held", "delayed"])
def test_a_resumed_training_is_the_uninterrupted_one(device, case, tmp_path):
    whole, first, second = (trainer(config(case), device, graph=True) for _ in range(3))
    list(whole.steps())
    list(first.steps(last=6))
    torch.save(first.state(), tmp_path / "state")
    second.load_state(torch.load(tmp_path / "state", weights_only=False))
    list(second.steps(last=9))
    second.load_state(second.state())  # the graph was of other tensors
    list(second.steps())
    assert_same(whole, second)


def test_what_stays_alive_in_the_memory_of_the_graph_gives_up_the_graph():
    plain, graphed = (trainer(config("nvfp4"), "cpu", graph=graph) for graph in (False, True))
    graphed.runner.pool.grows = [False, True]  # after the evaluation of step 4, and the sampled step 5
    list(plain.steps())
    list(graphed.steps())
    assert graphed.runner.pool.replays == [2, 4, 1]  # steps 3 and 4; 8, 9, 11 and 12; the evaluation after 12
    assert_same(plain, graphed)


def broken(training, error):
    """Capturing fails midway."""
    graph = training.runner.pool

    def capture(function):
        function()
        raise error

    before = [tensor.clone() for tensor in graph.tensors()]

    def undone(function):
        before[:] = [tensor.clone() for tensor in graph.tensors()]
        try:
            capture(function)
        finally:
            with torch.no_grad():
                for tensor, value in zip(graph.tensors(), before, strict=True):
                    tensor.copy_(value)

    graph.capture = undone
    return training


@pytest.mark.feature("H7")
def test_a_step_that_cannot_be_captured_runs_eagerly_and_says_why_once():
    plain = trainer(config("held"), "cpu", graph=False)
    graphed = broken(trainer(config("held"), "cpu", graph=True), RuntimeError("no such thing\nat line 3"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(graphed.steps())
    said = [str(w.message) for w in caught if "train.compile" in str(w.message)]
    why = "the step cannot be captured: no such thing"
    assert said == [f"train.compile: {why}; it runs eagerly, with the same bits"] and graphed.runner.reason == why
    list(plain.steps())
    assert_same(plain, graphed)


def test_a_step_that_has_to_be_captured_and_cannot_is_refused():
    training = broken(trainer(config("mxfp8"), "cpu", graph=True), RuntimeError("no such thing"))
    training.runner.mode = "graph"
    with pytest.raises(UserError, match=r"train.compile: graph, but the step cannot be captured: no such thing; give"):
        list(training.steps())


def test_the_keys_of_experts_live_as_long_as_the_graph():
    training = trainer(config("experts"), "cpu", graph=True)
    list(training.steps(last=4))
    assert training.runner._update.tables
    tables = {id(table) for table in training.runner._update.tables}
    library._key_table.results.clear()
    list(training.steps(last=5))
    assert {id(table) for table in training.runner._update.tables} == tables


def test_held_weights_that_were_written_more_often_than_there_were_steps():
    plain, graphed = (trainer(config("held"), "cpu", graph=graph) for graph in (False, True))
    for training in (plain, graphed):
        weight = training.model.layers[0].mlp.fc1.weight
        for _ in range(3):
            weight.quantize_(weight.dequantize())
        list(training.steps())
    assert weight.metadata.key.step == 12 + 3
    assert_same(plain, graphed)


def test_a_held_weight_that_is_written_twice_a_step_is_no_graph():
    training = trainer(config("held"), "cpu", graph=True)
    update, weight = training._update, training.model.layers[0].mlp.fc1.weight
    training._update = lambda *batch: (update(*batch), weight.quantize_(weight.dequantize()))[0]
    with pytest.warns(UserWarning, match="cannot be captured: a held weight is not written once a step"):
        list(training.steps(last=4))


@pytest.mark.parametrize(
    ("device", "train", "reason"),
    [
        ("cpu", {}, "there are no graphs on the CPU"),
        pytest.param("cuda", {"compile": "off"}, "train.compile is off", marks=pytest.mark.gpu),
        pytest.param("cuda", {"offload": True}, "train.offload copies on streams", marks=pytest.mark.gpu),
        pytest.param("cuda", {"compile": "graph"}, None, marks=pytest.mark.gpu),
    ],
)
def test_why_steps_are_no_graph(device, train, reason):
    training = Trainer(cfg := config("bf16", **train), data.load(cfg.data), cfg.recipe.build(), torch.device(device))
    assert (training.runner.pool is None) == (reason is not None)
    assert training.runner.reason is None if reason is None else training.runner.reason.startswith(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["mxfp8", "nvfp4"])
def test_graph_and_eager_work_share_memory_that_does_not_grow(case):
    cfg = config(case, steps=60, batch=64, context=128, eval_every=10)
    sizes = {}
    for graph in (False, True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        training, grown = trainer(cfg, "cuda", graph=graph), []
        for done in training.steps():
            grown.append(torch.cuda.memory_reserved() - before)
            if done.step == 32:
                settled = grown[-1]
        sizes[graph] = grown[-1]
        assert grown[-1] <= settled + 2**22
        assert training.runner.has_graph == graph
        del training
    assert sizes[True] <= 1.3 * sizes[False] + 2**25


def test_a_larger_tensor_where_a_smaller_one_lay_is_seen(monkeypatch):
    """Its end may lie in memory that a graph writes over."""

    def block(address, size, state="active_allocated"):
        return {"address": address, "size": size, "state": state}

    blocks = [block(0, 512), block(512, 512, "inactive"), block(1024, 512)]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda pool: [{"blocks": blocks}])
    pool = GraphPool.__new__(GraphPool)
    pool.pool = SimpleNamespace(id=(0, 1))
    pool.settle()
    blocks[0] = block(0, 512, "inactive")
    assert not pool.grown()
    blocks[:2] = [block(0, 1024)]
    assert pool.grown()
