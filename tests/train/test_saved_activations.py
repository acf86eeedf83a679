"""train.recompute and train.offload: the same training to the byte, resumable, in less memory."""

import functools

import pytest
import torch
from cases import BASE_LINEARS, PLAIN, RANDOM

from hqsweep.config.job import parse
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink
from hqsweep.nn.saved_memory import ActivationOffload
from hqsweep.train import data
from hqsweep.train.checkpoint import load_checkpoint, save_checkpoint
from hqsweep.train.loop import Trainer

pytestmark = [pytest.mark.usefixtures("deterministic"), pytest.mark.slow]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
ATTENTION = {PLAIN: {"dpa": PLAIN}, "hybrid": {"dpa": f"{RANDOM}|{PLAIN}"}}
"""Recipes that quantize attention, too."""
RECIPES = {name: {"linear": section} | ATTENTION.get(name, {}) for name, section in BASE_LINEARS.items()}
WAYS = {
    "layer": {"recompute": "layer"},
    "attention": {"recompute": "attention"},
    "offload": {"offload": True},
    "both": {"recompute": "layer", "offload": True},
}
CASES = [(recipe, way) for recipe in RECIPES for way in (WAYS if recipe in ("nvfp4", *ATTENTION) else ["both"])]
"""Every recipe both ways at once; each way alone for a plain recipe and for those that quantize attention."""


def config(recipe, *, held=False, stats=0, model=None, **train):
    return parse(
        {
            "job": "convergence", "sweep": "t", "recipe": {"name": "r", **RECIPES[recipe]},
            "model": {"dim": 64, "layers": 2, "heads": 2, "quantized_weights": held, **(model or {})},
            "stats": {"every": stats}, "data": {"source": "markov", "markov": {"length": 20000}},
            "train": {"steps": 3, "batch": 4, "context": 32, "eval_batches": 1, "eval_every": 3, "log_every": 1,
                      "checkpoint_every": 2, "device": "cpu", "lr": 1e-2, **train},
        }
    )  # fmt: skip


def trainer(cfg):
    return Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), torch.device(cfg.train.device))


def masters_and_moments(run):
    for name, p in run.model.named_parameters():
        yield f"{name}.master", run.optimizer.master_param(p)
        yield from ((f"{name}.{moment}", run.optimizer.state[p][moment]) for moment in ("exp_avg", "exp_avg_sq"))


def assert_same_parameters(a, b):
    for (name, expected), (_, got) in zip(masters_and_moments(a), masters_and_moments(b), strict=True):
        assert torch.equal(got, expected), name


@functools.cache
def plainly_trained(recipe, held, device):
    """Each step of a training that recomputes and offloads nothing, with its masters and moments."""
    run = trainer(config(recipe, held=held, stats=2, device=device))
    return [(step, {name: x.clone() for name, x in masters_and_moments(run)}) for step in run.steps()]


@pytest.mark.feature("F123", "F161")
@devices
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(("recipe", "way"), CASES)
def test_training_is_the_same(recipe, way, held, device):
    """Metrics, statistics of a sampled step, masters and moments of every step."""
    other = trainer(config(recipe, held=held, stats=2, device=device, **WAYS[way]))
    for (a, expected), b in zip(plainly_trained(recipe, held, device), other.steps(), strict=True):
        assert a == b
        assert bool(a.stats) == (a.step == 2)
        got = dict(masters_and_moments(other))
        assert got.keys() == expected.keys()
        assert [name for name, x in got.items() if not torch.equal(x, expected[name])] == []


def test_microbatches_with_cached_weights_are_the_same():
    plain, other = (trainer(config("nvfp4", microbatches=2, stats=2, **way)) for way in ({}, WAYS["both"]))
    assert list(plain.steps()) == list(other.steps())
    assert_same_parameters(plain, other)


def test_activations_do_leave_the_device(monkeypatch):
    seen, right = [], ActivationOffload._pack

    def pack(self, tensor):
        packed = right(self, tensor)
        seen.append((tensor.nbytes, packed is not tensor))
        return packed

    monkeypatch.setattr(ActivationOffload, "_pack", pack)
    list(trainer(config("mxfp8", offload=True)).steps())
    assert sum(nbytes for nbytes, gone in seen if gone) > 0.7 * sum(nbytes for nbytes, _ in seen)


@pytest.mark.feature("T22")
@pytest.mark.parametrize("way", WAYS)
def test_resume_equals_uninterrupted_and_training_without(way, tmp_path):
    cfg = config("nvfp4", **WAYS[way])
    plain, whole, half, resumed = (trainer(c) for c in (config("nvfp4"), cfg, cfg, cfg))
    for t in (plain, whole):
        list(t.steps())
    next(half.steps())
    save_checkpoint(half, tmp_path)
    assert load_checkpoint(resumed, tmp_path) and resumed.step == 1
    list(resumed.steps())
    assert_same_parameters(whole, resumed)
    assert_same_parameters(plain, resumed)


def test_the_job_takes_them(tmp_path):
    curves = []
    for way in ({}, WAYS["both"]):
        sink = ListSink()
        convergence.run(config("mxfp8", **way), sink, tmp_path / f"{len(way)}")
        curves.append(sink.metrics)
    assert curves[0] == curves[1]


@pytest.mark.feature("F123", "F161")
@pytest.mark.gpu
def test_memory_falls():
    """Activations of 8 layers, 1.4 GB, beside 0.1 GB of parameters and moments; attention alone saves less."""
    peaks, shape = {}, {"batch": 32, "context": 512, "device": "cuda"}
    for name, way in {"none": {}, **WAYS}.items():
        steps = trainer(config("mxfp8", model={"dim": 256, "layers": 8, "heads": 4}, **shape, **way)).steps()
        next(steps)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        next(steps)
        peaks[name] = torch.cuda.max_memory_allocated()
        del steps
    assert all(peaks[name] < 0.6 * peaks["none"] for name in ("layer", "offload", "both")), peaks
    assert peaks["attention"] < 0.97 * peaks["none"], peaks
