"""A fork starts from its trunk's whole state: the baseline's is the trunk that simply goes on, to the bit."""

import pytest
import torch
from cases import DELAYED_IN_PARTS, LINEARS

from hqsweep.config.job import ConvergenceConfig, parse
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink
from hqsweep.nn import set_recipe
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.train import data
from hqsweep.train.checkpoint import read_state
from hqsweep.train.loop import Trainer
from hqsweep.train.record import checkpoints

pytestmark = pytest.mark.slow

NVFP4 = LINEARS["nvfp4"]
SR_WEIGHTS = {"input": "bf16", "weight": "nvfp4|nvfp4+sr@rowwise_dequantized", "grad_output": "bf16"}
DELAYED = DELAYED_IN_PARTS
HELD_DELAYED = {"input": "bf16", "weight": "fp8_delayed|fp8_delayed+e5m2", "grad_output": "bf16"}
MOE = {"experts": 2, "top_k": 1}
AT, STEPS, DECAY = 3, 4, 2


def config(linear="bf16", *, at=AT, steps=STEPS, noise=0.0, trunk="trunk", quantized=False, schedule=(), **model):
    """A fork; with trunk=None a trunk."""
    points = at if isinstance(at, list) else [at]
    last = max(points) if trunk is None else at + steps + DECAY
    return parse(
        {
            "job": "convergence", "sweep": "t", "seed": 1,
            "recipe": {"name": "r", "linear": linear, "schedule": list(schedule)},
            "model": {"dim": 32, "layers": 1, "heads": 2, "quantized_weights": quantized, **model},
            "data": {"source": "markov", "markov": {"length": 20000}}, "stats": {"every": 0},
            "train": {"steps": last, "batch": 4, "context": 32, "eval_batches": 2, "eval_every": 4, "log_every": 3,
                      "checkpoint_every": 2, "device": "cpu", "lr": 1e-2},
            "fork": {"at": points, "steps": steps, "decay": DECAY, "warmup": 2, "trunk": trunk, "noise": noise},
        }
    )  # fmt: skip


def trainer(cfg: ConvergenceConfig) -> Trainer:
    return Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), torch.device("cpu"))


def run(cfg: ConvergenceConfig, folder) -> ListSink:
    folder.mkdir(parents=True, exist_ok=True)
    sink = ListSink()
    convergence.run(cfg, sink, folder)
    return sink


def held(training: Trainer) -> dict[str, torch.Tensor]:
    """Every byte of model and optimizer."""
    tensors = {}
    for name, value in training.model.state_dict().items():
        parts = value.buffers if isinstance(value, HybridQuantizedTensor) else {"": value}
        tensors |= {f"{name}.{part}": buffer.clone() for part, buffer in parts.items()}
    for index, p in enumerate(training.model.parameters()):
        tensors |= {f"{index}.{key}": value.clone() for key, value in training.optimizer.state[p].items()}
    return tensors


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def forked(cfg: ConvergenceConfig, folder) -> Trainer:
    """A fork of the trunk in `folder`/trunk, before its first step."""
    training = trainer(cfg)
    training.fork_from(read_state(cfg.fork.state_path(folder / "fork"), torch.device("cpu")))
    return training


BASELINES = {
    "bf16": {},
    "nvfp4 with random bits": {"linear": NVFP4},
    "delayed": {"linear": DELAYED},
    "held": {"linear": "mxfp8", "quantized": True},
    "held with random bits": {"linear": SR_WEIGHTS, "quantized": True},
    "held delayed": {"linear": HELD_DELAYED, "quantized": True},
    "experts": {"linear": "mxfp8", **MOE},
    "held experts": {"linear": "mxfp8", "quantized": True, **MOE},
    "delayed experts": {"linear": DELAYED, **MOE},
}


@pytest.mark.parametrize("baseline", BASELINES.values(), ids=BASELINES)
def test_the_baselines_fork_is_the_trunk_that_goes_on(baseline, tmp_path):
    run(config(trunk=None, **baseline), tmp_path / "trunk")
    fork, longer = forked(config(**baseline), tmp_path), trainer(config(trunk=None, at=[AT, AT + STEPS], **baseline))
    for done in longer.steps():
        if done.step == AT:
            assert same(held(fork), held(longer))
    list(fork.steps(last=AT + STEPS))
    assert fork.step == longer.step and same(held(fork), held(longer))


ARMS = {
    "mxfp8": {"linear": "mxfp8"},
    "nvfp4": {"linear": NVFP4},
    "delayed": {"linear": DELAYED},
    "experts": {"linear": NVFP4, **MOE},
}


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)
def test_an_arms_fork_is_a_run_whose_schedule_changes_to_its_recipe_at_the_point(arm, tmp_path):
    model = {key: value for key, value in arm.items() if key != "linear"}
    run(config(trunk=None, **model), tmp_path / "trunk")
    fork, other = forked(config(**arm), tmp_path), trainer(config(trunk=None, at=AT + STEPS, **model))
    list(other.steps(last=AT))
    changed = trainer(config(**arm))
    assert not same(held(fork), held(changed))
    set_recipe(other.model, changed.stage.recipe)
    list(other.steps())
    list(fork.steps(last=AT + STEPS))
    assert same(held(fork), held(other))


@pytest.mark.parametrize("linear", ["nvfp4|mxfp8", SR_WEIGHTS], ids=["hybrid", "with random bits"])
@pytest.mark.parametrize("experts", [{}, MOE], ids=["dense", "experts"])
def test_held_weights_of_an_arm_are_quantized_from_the_masters(linear, experts, tmp_path):
    """So that training goes on as without held weights, which are quantized at every use; bits of +sr are keyed by the
    step."""
    run(config(trunk=None, quantized=True, **experts), tmp_path / "trunk")
    fork = forked(config(linear, quantized=True, **experts), tmp_path)
    state = read_state(tmp_path / "trunk" / "checkpoint" / f"step_{AT}.pt", torch.device("cpu"))
    masters = [each["master_param"] for each in state["optimizer"]["state"].values() if "master_param" in each]
    ours = [fork.optimizer.master_param(p) for p in fork.model.parameters() if isinstance(p, HybridQuantizedTensor)]
    assert len(masters) == len(ours) and {m.double().sum().item() for m in masters} == {
        m.double().sum().item() for m in ours
    }
    before = trainer(config(linear, quantized=True, **experts))
    for p, q in zip(fork.model.parameters(), before.model.parameters(), strict=True):
        if not isinstance(p, HybridQuantizedTensor):
            continue
        key = q.metadata.key
        assert p.quantizer == q.quantizer and (p.metadata.key is None) == (key is None)
        if key is not None:
            assert p.metadata.key.step == key.step + AT
        again = type(p).quantize(
            fork.optimizer.master_param(p), p.quantizer, source_dtype=torch.bfloat16, key=p.metadata.key
        )
        assert all(torch.equal(again.buffers[name], buffer) for name, buffer in p.buffers.items())
    list(fork.steps())
    if linear == "nvfp4|mxfp8":
        run(config(trunk=None, **experts), tmp_path / "plain" / "trunk")
        plain = forked(config(linear, **experts), tmp_path / "plain")
        list(plain.steps())
        for p, q in zip(plain.model.parameters(), fork.model.parameters(), strict=True):
            assert torch.equal(p, fork.optimizer.master_param(q))


def test_delayed_states_go_on_where_the_slot_is_the_same_and_else_begin_anew(tmp_path):
    run(config(DELAYED, trunk=None), tmp_path / "trunk")
    other = {"input": "fp8_delayed|mxfp8", "weight": "mxfp8", "grad_output": "fp8_delayed+e5m2+history2|mxfp8"}
    fork, trunk = forked(config(other), tmp_path), forked(config(DELAYED), tmp_path)
    states, before = (dict(training.model.layers[0].mlp.fc1.states.items()) for training in (fork, trunk))
    assert set(before) == {"input_rowwise", "weight_columnwise", "grad_output_rowwise"}
    assert set(states) == {"input_rowwise", "grad_output_rowwise"}
    assert torch.equal(states["input_rowwise"].history, before["input_rowwise"].history)
    assert states["input_rowwise"].step == AT and before["input_rowwise"].history.any()
    assert states["grad_output_rowwise"].step is None and not states["grad_output_rowwise"].history.any()


def test_held_weights_in_another_delayed_format_begin_with_a_history_of_their_own(tmp_path):
    run(config(trunk=None, quantized=True), tmp_path / "trunk")
    fork = forked(config(HELD_DELAYED, quantized=True), tmp_path)
    linear = fork.model.layers[0].mlp.fc1
    state = linear.states["weight_rowwise"]
    assert linear.weight.states.states["rowwise"] is state
    assert state.history[0] == fork.optimizer.master_param(linear.weight).bfloat16().abs().max()
    assert not state.history[1:].any()
    list(fork.steps())


@pytest.mark.parametrize("quantized", [False, True])
def test_noise_touches_masters_and_what_is_held_and_none_is_the_baseline(quantized, tmp_path):
    run(config("mxfp8", trunk=None, quantized=quantized), tmp_path / "trunk")
    calm, none, noisy, again = (
        forked(config("mxfp8", quantized=quantized, **noise), tmp_path)
        for noise in ({}, {"noise": 0.0}, {"noise": 0.01}, {"noise": 0.01})
    )
    assert same(held(noisy), held(again)) and same(held(calm), held(none))
    for p, q in zip(calm.model.parameters(), noisy.model.parameters(), strict=True):
        a, b = calm.optimizer.master_param(p), noisy.optimizer.master_param(q)
        ratio = ((b - a) / a)[a != 0]
        assert ratio.any() and (ratio.numel() < 1000 or ratio.std().item() == pytest.approx(0.01, rel=0.1))
        if isinstance(q, HybridQuantizedTensor):
            now = HybridQuantizedTensor.quantize(b, q.quantizer, source_dtype=torch.bfloat16)
            assert all(torch.equal(now.buffers[name], buffer) for name, buffer in q.buffers.items())


def test_the_rate_rises_stays_and_in_a_fork_falls_to_zero():
    trunk, fork = config(trunk=None, at=[6]).fork, config().fork
    assert [trunk.rate(step) for step in range(1, 7)] == [0.5, 1, 1, 1, 1, 1]
    assert [fork.rate(step) for step in range(AT + 1, AT + STEPS + DECAY + 1)] == [1, 1, 1, 1, 1, 0.5]


def test_rows_of_a_fork_count_from_the_point_and_one_ends_the_constant_stretch(tmp_path):
    trunk = run(config(trunk=None), tmp_path / "trunk")
    fork = run(config("mxfp8"), tmp_path / "fork")
    rows = {row["step"]: row["value"] for row in fork.metrics if row["metric"] == "train_loss"}
    assert list(rows) == [AT + 3, AT + 4, AT + 6]
    steps = forked(config("mxfp8"), tmp_path)
    steps.config.__dict__["train"] = steps.config.train.model_copy(update={"log_every": 1})
    losses = {done.step: done.loss for done in steps.steps()}
    assert list(losses) == list(range(AT + 1, AT + 7))
    assert rows[AT + 6] == pytest.approx((losses[AT + 5] + losses[AT + 6]) / 2)
    assert rows[AT + 3] == pytest.approx(sum(losses[AT + step] for step in (1, 2, 3)) / 3)
    values = [row for row in trunk.metrics if row["metric"] == "val_loss"]
    assert [row["step"] for row in values] == [AT] and fork.facts["trunk_val_loss"] == values[0]["value"]
    assert [row["step"] for row in fork.metrics if row["metric"] == "val_loss"] == [AT + 4, AT + 6]


def test_every_arm_of_a_point_sees_the_same_batches(tmp_path, monkeypatch):
    run(config(trunk=None), tmp_path / "trunk")
    seen, real = [], data.Dataset.batch

    def spy(self, split, seed, step, *rest):
        if split == "train":
            seen.append((seed, step))
        return real(self, split, seed, step, *rest)

    monkeypatch.setattr(data.Dataset, "batch", spy)
    for linear in ("bf16", NVFP4):
        seen.clear()
        list(forked(config(linear), tmp_path).steps())
        assert seen == [(1, step) for step in range(AT, AT + STEPS + DECAY)]


def test_a_schedule_of_an_arm_counts_the_forks_own_steps(tmp_path):
    run(config(trunk=None), tmp_path / "trunk")
    for at in (0.5, 3):
        fork = forked(config(schedule=[{"at": at, "linear": "mxfp8"}]), tmp_path)
        assert [stage.first_step for stage in fork.stages] == [AT + 1, AT + 4]
        steps = [done.step for done in fork.steps() if "recipe_stage" in done.metrics]
        assert steps == [AT + 1, AT + 4] and str(fork.model.layers[0].mlp.fc1.quantizers.input) == "mxfp8"


def test_a_trunk_keeps_its_points_and_a_fork_nothing(tmp_path):
    run(config(trunk=None, at=[3, 5, 8]), tmp_path / "trunk")
    assert list(checkpoints(tmp_path / "trunk" / "checkpoint")) == [3, 5, 6, 8]  # and the one before the last
    run(config(at=5), tmp_path / "fork")
    assert not (tmp_path / "fork" / "checkpoint").exists()


class Killed(Exception):
    pass


@pytest.mark.parametrize("cfg", [config(NVFP4, trunk=None, at=[3, 8]), config(NVFP4)], ids=["trunk", "fork"])
def test_killed_and_resumed_is_uninterrupted(cfg, tmp_path, monkeypatch):
    run(config(trunk=None), tmp_path / "trunk")
    whole = run(cfg, tmp_path / "whole")
    sink, real, stop = ListSink(), Trainer._advance, cfg.start + 5

    def killed(self):
        if self.step == stop:
            raise Killed
        return real(self)

    monkeypatch.setattr(Trainer, "_advance", killed)
    (tmp_path / "half").mkdir()
    with pytest.raises(Killed):
        convergence.run(cfg, sink, tmp_path / "half")
    monkeypatch.undo()
    assert max(checkpoints(tmp_path / "half" / "checkpoint")) == cfg.start + 4
    convergence.run(cfg, sink, tmp_path / "half")
    assert sink.metrics == whole.metrics
    ours, theirs = (checkpoints(tmp_path / name / "checkpoint") for name in ("half", "whole"))
    assert list(ours) == list(theirs) == ([3, 6, 8] if cfg.fork.is_trunk else [])
    for step in ours:
        a, b = trainer(cfg), trainer(cfg)
        a.load_state(read_state(ours[step], a.device))
        b.load_state(read_state(theirs[step], b.device))
        assert same(held(a), held(b))


def test_a_trunk_makes_up_for_points_that_are_asked_for_later(tmp_path):
    """Its rows are as they were, and the new states are those of a trunk that had all points from the start."""
    first, sink = config(NVFP4, trunk=None, at=[3, 8]), ListSink()
    run(config(NVFP4, trunk=None, at=[2, 3, 6, 8, 9]), tmp_path / "all")
    (tmp_path / "trunk").mkdir()
    convergence.run(first, sink, tmp_path / "trunk")
    rows, folder = list(sink.metrics), tmp_path / "trunk" / "checkpoint"
    before = (folder / "step_8.pt").stat().st_mtime_ns
    convergence.run(config(NVFP4, trunk=None, at=[2, 3, 6, 8]), sink, tmp_path / "trunk")
    assert sink.metrics == rows and (folder / "step_8.pt").stat().st_mtime_ns == before
    convergence.run(config(NVFP4, trunk=None, at=[2, 3, 6, 8, 9]), sink, tmp_path / "trunk")
    ours, theirs = checkpoints(folder), checkpoints(tmp_path / "all" / "checkpoint")
    assert list(ours) == list(theirs) == [2, 3, 6, 8, 9]
    for step in ours:
        trainings = [trainer(first) for _ in range(2)]
        for each, path in zip(trainings, (ours[step], theirs[step]), strict=True):
            each.load_state(read_state(path, each.device))
        assert same(*map(held, trainings)), step
        assert read_state(ours[step], "cpu")["val_loss"] == read_state(theirs[step], "cpu")["val_loss"]
