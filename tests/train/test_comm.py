"""recipe.comm in the training loop: rounded gradients of the parts of a batch."""

import pytest
import torch
from support.parallel.training_ranks import config, train, trainer

from hqsweep.errors import UserError
from hqsweep.sweep.grid.compose import expand
from hqsweep.sweep.store.names import run_id


def exchanging(format: str, ranks: int = 2, **more):
    return {"linear": "mxfp8", "comm": {"format": format, "ranks": ranks}, **more}


def test_fp32_is_the_run_in_as_many_microbatches():
    """Which is the run over two ranks to the byte (test_ranks.py)."""
    metrics, stats, state = train(config(exchanging("fp32")))
    wanted, rows, expected = train(config("mxfp8", microbatches=2))
    assert metrics == wanted and stats == rows
    assert all(torch.equal(value, expected["model"][name]) for name, value in state["model"].items())


@pytest.mark.parametrize("model", [{}, {"quantized_weights": True}])
def test_gradients_are_sums_of_rounded_ones(model):
    own, plain = trainer(config(exchanging("bf16", 4), model=model)), trainer(config("mxfp8", model=model))
    gradients = {}
    step = own.optimizer.clip_and_step

    def look(*args):
        gradients.update({name: p.grad.clone() for name, p in own.model.named_parameters()})
        return step(*args)

    own.optimizer.clip_and_step = look
    next(own.steps())
    batch = plain._batch("train", 0)
    plain.microbatches.config = plain.config.model_copy(
        update={"train": plain.config.train.model_copy(update={"microbatches": 1})}
    )
    sums = {}
    for rank, (inputs, targets) in enumerate(zip(*(tokens.chunk(4) for tokens in batch), strict=True)):
        plain.model.zero_grad()
        plain.microbatches._first = rank
        plain.microbatches.step(inputs, targets, At())
        for name, p in plain.model.named_parameters():
            part = (p.grad / 4).bfloat16().float()
            sums[name] = sums[name] + part if name in sums else part
    assert gradients.keys() == sums.keys()
    assert all(torch.equal(gradients[name], total) for name, total in sums.items())


class At:
    step, counter, probe = 1, None, None


def test_a_schedule_changes_it():
    recipe = exchanging("mxfp4+sr", 2, schedule=[{"at": 1, "comm": {"format": "fp32", "ranks": 2}}])
    run = trainer(config(recipe))
    formats = [str(run.microbatches.comm.format) for _ in run.steps()]
    assert formats == ["mxfp4+sr", "fp32"]


def test_faults_are_sentences_and_ids_of_others_stay():
    with pytest.raises(UserError, match=r"recipe.comm: emulates 2 ranks in one process, but train.parallel has 2 ran"):
        config(exchanging("bf16"), parallel={"dp_shard": 2})
    with pytest.raises(UserError, match=r"recipe.comm.ranks: 4 sequences \(train.batch\) do not divide into 3 ranks"):
        config(exchanging("bf16", 3))
    cfg = config("mxfp8").model_dump(mode="json")
    before = cfg | {"recipe": {key: value for key, value in cfg["recipe"].items() if key != "comm"}}
    assert run_id(cfg) == run_id(before) != run_id(config(exchanging("bf16")).model_dump(mode="json"))
    grid = expand("convergence", ["recipe=mxfp8", "recipe.comm=null,bf16,nvfp4+sr", "recipe.linear.input=nvfp4"])
    assert [point.arm for point in grid.points] == ["mxfp8_comm-null", "mxfp8_comm-bf16", "mxfp8_comm-nvfp4+sr"]
