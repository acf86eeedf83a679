"""model.router=replay: a forward in train.dtype on the same weights makes the choices."""

import copy

import pytest
import torch

from hqsweep.config.job import parse
from hqsweep.errors import UserError
from hqsweep.nn import autocast
from hqsweep.nn.router import Router
from hqsweep.sweep.store.names import run_id
from hqsweep.train import data
from hqsweep.train.loop import Trainer


def config(linear="mxfp4", router="replay", *, model=None, **train):
    return parse(
        {
            "job": "convergence", "sweep": "t", "stats": {"every": 2}, "recipe": {"name": "r", "linear": linear},
            "model": {"dim": 32, "layers": 2, "heads": 2, "experts": 4, "router": router, **(model or {})},
            "data": {"source": "markov", "markov": {"length": 20000}},
            "train": {"steps": 4, "batch": 4, "context": 32, "eval_batches": 1, "log_every": 1, "eval_every": 4,
                      "device": "cpu", "lr": 0.02, **train},
        }
    )  # fmt: skip


def trainer(*args, **more) -> Trainer:
    cfg = config(*args, **more)
    return Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), torch.device("cpu"))


def trained(run: Trainer):
    rows = [(step.metrics, step.stats) for step in run.steps()]
    return rows, [p.detach().clone() for p in run.model.parameters()]


def assert_same(a, b):
    assert a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


@pytest.mark.parametrize(("linear", "dtype"), [("bf16", "bf16"), ("fp32", "fp32")])
def test_in_high_precision_it_is_the_free_run_to_the_bit(linear, dtype):
    assert_same(trained(trainer(linear, dtype=dtype)), trained(trainer(linear, "free", dtype=dtype)))


def test_choices_are_those_of_the_same_weights_in_bf16():
    run = trainer()
    list(run.steps(3))
    tokens = run._batch("train", 3)[0]
    seen, routers = {}, [module for module in run.model.modules() if isinstance(module, Router)]

    def choices(recipe: str | None, given: bool) -> list[torch.Tensor]:
        hooks = [r.register_forward_hook(lambda r, _, out: seen.update({r: out.chosen})) for r in routers]
        with torch.no_grad():
            if given:
                run.adapter.losses(tokens, tokens)
            else:
                for router in routers:
                    router.given = None
                with autocast(recipe=recipe) if recipe else torch.no_grad():
                    run.model.hidden(tokens)
        for hook in hooks:
            hook.remove()
        return [seen[router] for router in routers]

    replayed, plain, free = choices(None, True), choices("format:bf16", False), choices(None, False)
    assert all(torch.equal(a, b) for a, b in zip(replayed, plain, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(replayed, free, strict=True))


@pytest.mark.parametrize("changes", [{"recompute": "layer"}, {"offload": True}])
def test_recomputation_and_offload_replay_the_same_choices(changes):
    (rows, weights), (others, same) = trained(trainer(**changes)), trained(trainer())
    assert [metrics for metrics, _ in rows] == [metrics for metrics, _ in others]
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


def test_a_resumed_run_is_the_uninterrupted_one():
    first = trainer()
    list(first.steps(2))
    state = copy.deepcopy(first.state())
    second = trainer()
    second.load_state(state)
    assert_same(trained(second), trained(first))


def test_the_router_takes_given_choices_with_its_own_weights():
    router = Router(8, 4, 2)
    x = torch.randn(6, 8)
    free = router(x)
    router.given = free.chosen.flip(1)
    other = router(x)
    assert torch.equal(other.chosen, router.given) and torch.equal(other.tokens, free.tokens)
    assert torch.allclose(other.weights.flip(1), free.weights) and torch.allclose(other.balance, free.balance)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"experts": 0}}, "model.router: replay takes choices .*, but model.experts is 0; give free"),
        ({"model": {"quantized_weights": True}}, "but model.quantized_weights leaves no values for it; give free"),
        ({"parallel": {"dp_shard": 2}}, "model.router: replay runs in one process, but train.parallel has 2 ranks"),
        ({"compile": "graph", "device": "cuda"}, "train.compile: graph, but model.router=replay runs steps eagerly"),
    ],
)
def test_faults_are_sentences(changes, said):
    with pytest.raises(UserError, match=said):
        config(**changes)


def test_free_runs_keep_their_ids():
    free = config(router="free").model_dump(mode="json")
    before = free | {"model": {key: value for key, value in free["model"].items() if key != "router"}}
    assert run_id(free) == run_id(before) != run_id(config().model_dump(mode="json"))
