"""model.quantized_weights: the same training to the byte, resumable, and from the command line's config."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import BASE_LINEARS
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from hqsweep.config.job import parse
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.quant.serialize import load_safetensors, save_safetensors
from hqsweep.train import data
from hqsweep.train.checkpoint import load_checkpoint, save_checkpoint
from hqsweep.train.loop import Trainer

pytestmark = pytest.mark.slow

RECIPES = BASE_LINEARS | {
    "fp8_delayed": {"input": "bf16", "weight": "fp8_delayed|fp8_delayed+e5m2+history2", "grad_output": "fp8_delayed"},
}


def config(linear, *, quantized=True, tied=False, stats=0, **train):
    return parse(
        {
            "job": "convergence", "sweep": "t", "recipe": {"name": "r", "linear": linear},
            "model": {"dim": 32, "layers": 1, "heads": 2, "tied": tied, "quantized_weights": quantized},
            "stats": {"every": stats}, "data": {"source": "markov", "markov": {"length": 20000}},
            "train": {"steps": 6, "batch": 4, "context": 32, "eval_batches": 2, "eval_every": 3, "log_every": 2,
                      "checkpoint_every": 3, "device": "cpu", "lr": 1e-2, **train},
        }
    )  # fmt: skip


def trainer(cfg, device="cpu"):
    return Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), torch.device(device))


def held(model):
    """Every byte that a model holds."""
    buffers = {}
    for name, p in model.state_dict().items():
        parts = p.buffers if isinstance(p, HybridQuantizedTensor) else {"": p}
        buffers |= {f"{name}.{part}": buffer.clone() for part, buffer in parts.items()}
    return buffers


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.feature("F98", "F155")
@pytest.mark.parametrize("linear", RECIPES.values(), ids=RECIPES)
def test_training_is_the_one_that_quantizes_at_every_use(linear):
    """Metrics, statistics, masters and moments of every step, against FP32 weights without any quantized tensor."""
    plain, quantized = trainer(config(linear, quantized=False, stats=3)), trainer(config(linear, stats=3))
    for a, b in zip(plain.steps(), quantized.steps(), strict=True):
        assert a == b
        for p, q in zip(plain.model.parameters(), quantized.model.parameters(), strict=True):
            assert torch.equal(p, quantized.optimizer.master_param(q))
            for moment in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(plain.optimizer.state[p][moment], quantized.optimizer.state[q][moment])


def test_linears_hold_operands_only_and_all_else_stays_plain():
    model = trainer(config("nvfp4|mxfp8")).model
    kinds = {name: isinstance(p, HybridQuantizedTensor) for name, p in model.named_parameters()}
    linears = {f"{linear.name}.weight" for linear in model.linears()}
    assert {name for name, is_quantized in kinds.items() if is_quantized} == linears
    assert str(model.layers[0].mlp.fc1.weight.quantizer) == "nvfp4|mxfp8" and str(model.head.weight.quantizer) == "bf16"


@pytest.mark.feature("F72", "F153")
def test_codes_are_those_of_the_masters_after_every_step():
    t = trainer(config("nvfp4|mxfp8"))
    for _ in t.steps():
        for linear in t.model.linears():
            master = t.optimizer.master_param(linear.weight)
            again = HybridQuantizedTensor.quantize(master, linear.weight.quantizer, source_dtype=torch.bfloat16)
            assert_same(linear.weight.buffers, again.buffers)


def test_initial_values_are_freed_by_the_first_step():
    t = trainer(config("mxfp8"))
    weight = t.model.layers[0].mlp.fc1.weight
    assert weight.get_high_precision_init_val().dtype == torch.float32
    next(t.steps())
    assert weight.get_high_precision_init_val() is None


@pytest.mark.feature("F133", "F154")
@pytest.mark.parametrize("linear", ["bf16", "nvfp4|nvfp4+sr@rowwise_dequantized", "fp8_current"])
@pytest.mark.parametrize("tied", [False, True])
def test_resume_equals_uninterrupted(linear, tied, tmp_path):
    """Models and optimizers to the byte, with random bits on weights too: their keys are in the checkpoint."""
    whole, half = trainer(config(linear, tied=tied)), trainer(config(linear, tied=tied))
    list(whole.steps())
    for done in half.steps():
        if done.step == 3:
            break
    save_checkpoint(half, tmp_path)
    resumed = trainer(config(linear, tied=tied))
    assert load_checkpoint(resumed, tmp_path) and resumed.step == 3
    list(resumed.steps())
    assert_same(held(whole.model), held(resumed.model))
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert_same(whole.optimizer.state[p], resumed.optimizer.state[q])


@pytest.mark.feature("F133", "F154")
def test_a_bf16_checkpoint_loads_into_quantized_weights():
    plain, quantized = trainer(config("nvfp4|mxfp8", quantized=False)).model, trainer(config("nvfp4|mxfp8")).model
    checkpoint = {name: (2 * p).bfloat16() for name, p in plain.state_dict().items()}
    quantized.load_state_dict(checkpoint)
    for linear in quantized.linears():
        value = checkpoint[f"{linear.name}.weight"]
        assert_same(
            {n: b for n, b in linear.weight.buffers.items() if not n.startswith("high")},
            HybridQuantizedTensor.quantize(value, linear.weight.quantizer).buffers,
        )
        assert torch.equal(linear.weight.get_high_precision_init_val(), value.float())


@pytest.mark.parametrize("tied", [False, True])
def test_a_safetensors_file_gives_the_model_back(tied, tmp_path):
    trained, fresh = trainer(config(RECIPES["hybrid"], tied=tied)), trainer(config(RECIPES["hybrid"], tied=tied))
    list(trained.steps())
    save_safetensors(trained.model.state_dict(), tmp_path / "model.safetensors")
    fresh.model.load_state_dict(load_safetensors(tmp_path / "model.safetensors"))
    for linear in fresh.model.linears():
        if isinstance(linear.weight, HybridQuantizedTensor):
            linear.weight.clear_high_precision_init_val()
    assert_same(held(trained.model), held(fresh.model))
    tokens = torch.arange(32).view(1, 32) % 16
    assert torch.equal(trained.model(tokens), fresh.model(tokens))


def test_the_job_checkpoints_and_resumes_with_quantized_weights(tmp_path):
    sinks = [ListSink(), ListSink()]
    convergence.run(config("nvfp4|mxfp8", quantized=True), sinks[0], tmp_path / "a")
    convergence.run(config("nvfp4|mxfp8", quantized=False), sinks[1], tmp_path / "b")
    assert sinks[0].metrics == sinks[1].metrics
    again = trainer(config("nvfp4|mxfp8"))
    assert load_checkpoint(again, tmp_path / "a" / "checkpoint") and again.step == 6


@pytest.mark.feature("F134", "F167")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("linear", ["nvfp4|mxfp8", RECIPES["fp8_delayed"]], ids=["hybrid", "fp8_delayed"])
def test_a_distributed_checkpoint_of_model_and_optimizer_forks_the_training(linear, tmp_path):
    """torch.distributed.checkpoint in one process, into a trainer that has run no step; both forks give the same bytes
    from there on."""
    first, second = trainer(config(linear)), trainer(config(linear))
    steps = first.steps()
    for _ in range(3):
        next(steps)
    dcp.save(distributed_state(first), checkpoint_id=tmp_path, no_dist=True)
    state = distributed_state(second)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(second.model, second.optimizer, **parts)
    second.step, second.loss_sum, second.loss_count = (state[name] for name in ("step", "loss_sum", "loss_count"))
    assert second.step == 3
    assert_same(held(first.model), held(second.model))
    for a, b in zip(steps, second.steps(), strict=True):
        assert a == b
        assert_same(held(first.model), held(second.model))


def distributed_state(trainer):
    """The state of a trainer, with the names of parameters in the optimizer's, whose moments and masters are there also
    before the first step."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    return trainer.state() | {"model": model, "optimizer": optimizer}
