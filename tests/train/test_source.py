"""A trunk that begins from a checkpoint of another program: its weights, its moments, and what is said of its loss."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hqsweep.checkpoints.inspect import inspect_checkpoint
from hqsweep.config.job import ConvergenceConfig, parse
from hqsweep.errors import UserError
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.train import data
from hqsweep.train.checkpoint import read_state
from hqsweep.train.loop import Trainer
from hqsweep.train.record import checkpoints, discard

pytestmark = pytest.mark.slow

AT = [4, 6]


def config(
    source: Path | None = None, *, rewarm: int = 2, linear: object = "bf16", **more: object
) -> ConvergenceConfig:
    """A trunk; more: keys of its sections train and model."""
    model = {"dim": 32, "layers": 1, "heads": 2, "quantized_weights": more.pop("quantized", False)}
    model["init_noise"] = more.pop("noise", 0.0)
    model = more.pop("user", model)
    begin = {"source": str(source), "source_hash": inspect_checkpoint(source).sha256} if source else {}
    return parse(
        {
            "job": "convergence", "sweep": "t", "seed": 1, "recipe": {"name": "r", "linear": linear}, "model": model,
            "data": {"source": "markov", "markov": {"length": 20000}}, "stats": {"every": 0},
            "train": {"steps": max(AT), "batch": 4, "context": 32, "eval_batches": 2, "eval_every": 4, "log_every": 3,
                      "checkpoint_every": 2, "device": "cpu", "lr": 1e-2} | more,
            "fork": {"at": AT, "steps": 2, "decay": 2, "warmup": rewarm, **begin},
        }
    )  # fmt: skip


def trainer(cfg: ConvergenceConfig) -> Trainer:
    return Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), torch.device("cpu"))


def run(cfg: ConvergenceConfig, folder: Path, sink: ListSink | None = None) -> ListSink:
    """sink: of the attempt before, whose rows are there."""
    folder.mkdir(parents=True, exist_ok=True)
    sink = sink or ListSink()
    convergence.run(cfg, sink, folder)
    return sink


def states(folder: Path) -> dict[int, dict]:
    """Step -> the state that a trunk has kept there."""
    return {step: read_state(path, torch.device("cpu")) for step, path in checkpoints(folder / "checkpoint").items()}


def same(a: object, b: object) -> bool:
    """Whether nested states hold equal bytes."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, HybridQuantizedTensor):
        return same(dict(a.buffers), dict(b.buffers))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else True


def trained(steps: int = 5, **more: object) -> Trainer:
    training = trainer(config(**more))
    list(training.steps(last=steps))
    return training


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """Trained weights, without an optimizer's state."""
    path = tmp_path_factory.mktemp("foreign") / "model.safetensors"
    save_file(trained().model.state_dict(), path)
    return path


@pytest.mark.parametrize("options", [{}, {"linear": "mxfp8"}, {"linear": "mxfp8", "quantized": True}], ids=str)
def test_initial_weights_from_a_file_are_the_trunk_that_begins_with_them(options, tmp_path):
    plain = {key: value for key, value in options.items() if key != "quantized"}
    save_file(trainer(config(**plain)).model.state_dict(), tmp_path / "w.safetensors")
    run(config(**options), tmp_path / "own")
    run(config(tmp_path / "w.safetensors", noise=0.5, **options), tmp_path / "foreign")
    own, foreign = states(tmp_path / "own"), states(tmp_path / "foreign")
    assert own.keys() == foreign.keys() == set(AT)
    assert all(same(own[at][part], foreign[at][part]) for at in AT for part in ("model", "optimizer"))


def test_a_trunk_says_with_which_loss_it_began_and_looks_at_it_until_the_first_fork(weights, tmp_path):
    sink = run(config(weights), tmp_path / "trunk")
    begun = trainer(config(weights))
    convergence.begin(begun, tmp_path)
    assert sink.facts["source_val_loss"] == begun.trunk["source_val_loss"] == begun.evaluate()
    assert sink.facts["source_moments"] is False and sink.facts["source_step"] is None
    assert [row["step"] for row in sink.tables["metrics"] if row["metric"] == "val_loss"] == [1, 2, 3, 4, 6]


def test_a_trunk_goes_on_with_the_moments_of_a_file_and_at_the_full_rate(tmp_path):
    before = trained()
    state = {"model": before.model.state_dict(), "optimizer": before.optimizer.state_dict()}
    torch.save(state, tmp_path / "foreign.pt")
    begun = trainer(config(tmp_path / "foreign.pt", rewarm=0))
    convergence.begin(begun, tmp_path)
    assert begun.trunk["source_moments"] and begun.step == 0
    for p, q in zip(begun.model.parameters(), before.model.parameters(), strict=True):
        assert torch.equal(p, q) and same(begun.optimizer.state[p], before.optimizer.state[q])
    assert next(begun.steps()).step == 1 and begun.optimizer.param_groups[0]["lr"] == 1e-2


def test_a_model_of_hugging_face_goes_on_with_the_moments_of_its_trainer(tmp_path):
    """Whose optimizer.pt has no names: what decays, then the rest."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                         num_attention_heads=2, max_position_embeddings=64))  # fmt: skip
    named = dict(llama.named_parameters())
    gains = {name for name in named if "norm" in name}
    groups = [[p for name, p in named.items() if (name in gains) == gain] for gain in (False, True)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    llama(input_ids=torch.arange(16)[None], labels=torch.arange(16)[None]).loss.backward()
    optimizer.step()
    llama.save_pretrained(tmp_path / "checkpoint-1")
    torch.save(optimizer.state_dict(), tmp_path / "checkpoint-1" / "optimizer.pt")
    cfg = config(tmp_path / "checkpoint-1", rewarm=0, user={"kind": "hf", "path": str(tmp_path / "checkpoint-1")})
    begun = trainer(cfg)
    convergence.begin(begun, tmp_path)
    assert begun.trunk["source_moments"] and begun.trunk["source_step"] == 1
    for name, p in begun.model.named_parameters():
        assert torch.equal(p, named[name]) and same(dict(begun.optimizer.state[p]), optimizer.state[named[name]]), name
    list(begun.steps(last=4))
    assert 0 < abs(begun.val_loss - begun.trunk["source_val_loss"]) < 0.5


@pytest.mark.parametrize("lost", [4, 6])
def test_a_trunk_that_was_interrupted_ends_as_one_that_was_not(lost, weights, tmp_path):
    """lost: the first of the states that are gone; before 4 there is none, so that it begins again."""
    cfg = config(weights)
    run(cfg, tmp_path / "whole")
    sink = run(cfg, tmp_path / "cut")
    for step, path in checkpoints(tmp_path / "cut" / "checkpoint").items():
        if step >= lost:
            discard(path)
    rows = list(sink.metrics)
    run(cfg, tmp_path / "cut", sink)
    assert sink.metrics == rows
    assert sink.facts["source_val_loss"] == states(tmp_path / "whole")[6]["trunk"]["source_val_loss"]
    assert same(states(tmp_path / "whole"), states(tmp_path / "cut"))


def test_a_lost_first_point_is_trained_again_from_the_checkpoint(weights, tmp_path):
    cfg = config(weights)
    sink = run(cfg, tmp_path / "trunk")
    whole, rows = states(tmp_path / "trunk"), list(sink.metrics)
    discard(tmp_path / "trunk" / "checkpoint" / "step_4.pt")
    run(cfg, tmp_path / "trunk", sink)
    assert sink.metrics == rows
    assert same(whole, states(tmp_path / "trunk"))


def test_a_loss_that_is_above_the_checkpoint_s_at_a_point_is_told(weights, tmp_path):
    back = run(config(weights, lr=1e-3), tmp_path / "back")
    above = [row["value"] for row in back.metrics if row["metric"] == "val_loss" and row["step"] in AT]
    assert len(back.facts["above_source"]) == sum(loss > back.facts["source_val_loss"] for loss in above) == 0
    late = run(config(weights, rewarm=1, lr=0.3), tmp_path / "late")
    assert [line[:22] for line in late.facts["above_source"]] == ["at step 4 val_loss is ", "at step 6 val_loss is "]
    assert set(late.facts["above_source"]) <= set(late.facts["warnings"])


def test_another_checkpoint_than_was_planned_is_refused(weights, tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(weights.read_bytes())
    cfg = config(path)
    save_file(trained(steps=2).model.state_dict(), path)
    with pytest.raises(UserError, match=r"fork.trunk: .* is another checkpoint than it was when this run was planned"):
        run(cfg, tmp_path / "trunk")
