"""What a training says of NaN and inf: the slot, since which step, in how many steps, and where a loss of NaN began."""

import math
import warnings

import pytest
import torch
from support.parallel import nonfinite_ranks as ranks
from support.parallel.nonfinite_ranks import SPOILED, spoil
from support.ranks import backend as backend
from support.ranks import run_ranks
from support.train.graph_cases import CASES
from support.train.graph_cases import config as graph_config

from hqsweep.jobs import convergence
from hqsweep.jobs.sink import Diverged, ListSink
from hqsweep.train import data
from hqsweep.train.checkpoint import load_checkpoint, save_checkpoint
from hqsweep.train.loop import Trainer
from tests.train.test_loop import config, trainer

pytestmark = pytest.mark.slow

SLOT = SPOILED  # the layer's name, and "weight"
ROWS = [f"{SLOT}.rowwise", f"{SLOT}.columnwise"]


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a run counts, and warns of nothing
        yield


def of_slots(metrics):
    return {name: value for name, value in metrics.items() if "nonfinite" in name}


@pytest.mark.parametrize("changes", [{}, {"recompute": "layer", "microbatches": 2}], ids=["once", "again"])
def test_a_nan_that_became_a_number_is_counted_by_slot_and_step(changes):
    run = trainer(config("nvfp4", steps=6, **changes))
    rows = [of_slots(done.metrics) for done in spoil(run, 3)]
    counts = {"nonfinite_nan": 2.0, **{f"nonfinite_nan.{slot}": 1.0 for slot in ROWS}}
    assert rows == [{}, {}, {}, counts, {}, counts]  # logged every 2 steps
    assert [(row["slot"], row["first"], row["last"], row["steps"]) for row in run.nonfinite.manifest()] == [
        (slot, 3, 3, 1) for slot in ROWS
    ]
    first, _ = run.nonfinite.news()
    assert first.startswith(f"{ROWS[0]} (nvfp4): a NaN was quantized to a number at step 3, as in Transf")
    assert run.nonfinite.news() == []


def test_a_training_without_any_says_nothing_and_computes_the_same():
    run = trainer(config("fp8_delayed+history4", steps=4))
    losses = [done.metrics for done in run.steps()]
    assert not any(map(of_slots, losses)) and run.nonfinite.manifest() == [] and run.nonfinite.began() == ""
    assert "nonfinite" not in run.state()


def inf_in_gradients(run, step):
    """Have one gradient of fc2's output be inf in a step."""
    module = dict(run.model.named_modules())["layers.0.mlp.fc2"]

    def spoiled(gradient):
        return gradient.index_fill(-1, torch.tensor([3]), math.inf) if run.step == step else gradient

    module.register_forward_hook(lambda _, args, y: y.register_hook(spoiled) and None if y.requires_grad else None)


@pytest.mark.parametrize(
    ("options", "until", "held"),
    [("+history4", 7, True), ("+history4+most_recent", 4, True), ("+history4+skip_nonfinite", None, False)],
)
def test_an_inf_in_a_history_is_told_with_the_steps_whose_scale_it_holds(options, until, held):
    run = trainer(config(f"fp8_delayed{options}", steps=10, log_every=1))
    inf_in_gradients(run, 3)
    module, scales = dict(run.model.named_modules())["layers.0.mlp.fc2"], []
    for _ in run.steps():
        scales.append(module.states["grad_output_rowwise"].amax.item())
    (row,) = [r for r in run.nonfinite.manifest() if r["kind"] == "amax" and r["slot"].endswith("grad_output.rowwise")]
    assert (row["first"], row["until"], row["lost"]) == (3, until, held)
    if held:
        assert len(set(scales[2:until])) == 1 and scales[until] != scales[until - 1]  # of the steps 3 to `until`
        assert f"took an amax of inf at step 3, which holds the scale up to step {until}, as" in row["sentence"]
    else:
        assert scales[3] == scales[2] != scales[4] and "was left out of its history" in row["sentence"]


def test_a_run_goes_on_counting_from_its_checkpoint(tmp_path):
    cfg = config("nvfp4", steps=8)
    through, first = trainer(cfg), trainer(cfg)
    expected = [of_slots(done.metrics) for done in spoil(through, 3)]
    steps = spoil(first, 3)
    while first.step < 5:
        next(steps)
    save_checkpoint(first, tmp_path)
    again = trainer(cfg)
    load_checkpoint(again, tmp_path)
    assert [of_slots(done.metrics) for done in again.steps()] == expected[5:]
    assert again.nonfinite.manifest() == through.nonfinite.manifest()


def test_a_loss_that_is_none_says_where_it_began(tmp_path, monkeypatch, capsys):
    reasons = {}
    for linear in ("mxfp8", "bf16"):
        monkeypatch.setattr(convergence, "Trainer", Spoiled)
        sink = ListSink()
        with pytest.raises(Diverged) as raised:
            convergence.run(config(linear, steps=8), sink, tmp_path / linear)
        reasons[linear] = str(raised.value).partition(";")[0], sink
    reason, sink = reasons["mxfp8"]
    assert reason == f"loss is nan at step 4, NaN came first in {ROWS[0]} at step 3"
    assert sink.facts["nonfinite"][0]["slot"] == ROWS[0]
    assert any(row["metric"] == f"nonfinite_nan.{ROWS[0]}" and row["step"] == 4 for row in sink.metrics)
    assert f"warning: {ROWS[0]} (mxfp8): a NaN was quantized in" in capsys.readouterr().out
    reason, sink = reasons["bf16"]
    assert reason.startswith("loss is nan at step 4, the norm of the gradients was not finite from step 3 on")
    assert "nonfinite" not in sink.facts


class Spoiled(Trainer):
    """A training that meets a NaN in its third step, which stays."""

    def _advance(self):
        if self.step == 2:
            dict(self.model.named_parameters())[SPOILED].detach().view(-1)[3] = torch.nan
        return super()._advance()


def test_what_one_rank_meets_all_of_them_tell(backend):
    cases = [("nvfp4", {"parallel": {"dp_replicate": 2}}), ("mxfp4", {"parallel": {"dp_shard": 2}})]
    one, other = run_ranks(2, ranks.spoil_one, cases, backend=backend)
    assert one == other
    for rows, metrics in one:
        assert [(row["slot"], row["first"], row["steps"]) for row in rows] == [(slot, 3, 1) for slot in ROWS]
        assert metrics[1] == {} and metrics[3]["nonfinite_nan"] == 2.0


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["nvfp4", "microbatches", "recompute", "delayed", "mxfp8"])
def test_a_graph_counts_as_eager_steps_do(case):
    met = []
    for compile in ("graph", "off"):
        cfg = graph_config(case, device="cuda", compile=compile, log_every=1)
        run = Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), torch.device("cuda"))
        rows = [of_slots(done.metrics) for done in spoil(run, 8)]
        assert run.runner.has_graph == (compile == "graph")
        assert case in CASES and rows[:7] == [{}] * 7 and rows[7][f"nonfinite_nan.{ROWS[0]}"] == 1.0
        met.append([(row["slot"], row["kind"], row["first"]) for row in run.nonfinite.manifest()][:2])
    assert met[0] == met[1]
