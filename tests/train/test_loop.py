"""The loop: schedules, identical batches, resume, divergence, and what a run leaves in its sink."""

import math
from contextlib import suppress

import pytest
import torch
from cases import DELAYED_IN_PARTS, LINEARS

from hqsweep.config.job import parse
from hqsweep.errors import UserError
from hqsweep.formats.spec import FINGERPRINT
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import Diverged, ListSink
from hqsweep.jobs.training_report import Throughput
from hqsweep.nn import quantization
from hqsweep.nn.core.call import LinearCall
from hqsweep.quant import HybridQuantizedTensor
from hqsweep.quant.delayed import DelayedState
from hqsweep.recipe.factories import find_factory
from hqsweep.sweep.grid.compose import load_recipe
from hqsweep.train import data, microbatches
from hqsweep.train.build import learning_rate
from hqsweep.train.checkpoint import load_checkpoint, save_checkpoint
from hqsweep.train.loop import Trainer
from hqsweep.train.model import build_model

pytestmark = pytest.mark.slow

DELAYED = DELAYED_IN_PARTS
CURRENT_BACKWARD = {
    "input": "fp8_delayed|fp8_current", "weight": "fp8_delayed|fp8_current", "grad_output": "fp8_current+e5m2"
}  # fmt: skip
NVFP4 = LINEARS["nvfp4"]


def config(linear="bf16", *, stats=None, seed=0, tied=False, schedule=(), **train):
    recipe = {"name": "r", "linear": linear, "schedule": list(schedule)}
    return parse(
        {
            "job": "convergence", "sweep": "t", "seed": seed, "recipe": recipe,
            "model": {"dim": 32, "layers": 1, "heads": 2, "tied": tied}, "stats": stats or {"every": 0},
            "data": {"source": "markov", "markov": {"length": 20000}},
            "train": {"steps": 8, "batch": 4, "context": 32, "eval_batches": 2, "eval_every": 4, "log_every": 2,
                      "checkpoint_every": 4, "device": "cpu", **train},
        }
    )  # fmt: skip


def trainer(cfg):
    return Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), torch.device("cpu"))


@pytest.mark.feature("F17", "T2")
@pytest.mark.parametrize("linear", ["mxfp8", DELAYED, CURRENT_BACKWARD], ids=["mxfp8", "delayed", "delayed, current"])
def test_training_learns_the_source(linear, tmp_path):
    sink = ListSink()
    convergence.run(config(linear, steps=60, lr=1e-2), sink, tmp_path)
    losses = [m["value"] for m in sink.metrics if m["metric"] == "val_loss"]
    assert losses[0] > losses[-1] and losses[-1] < sink.facts["data"]["unigram_entropy_nats"]
    assert losses[-1] > sink.facts["data"]["entropy_rate_nats"]


@pytest.mark.parametrize("gemm", ["exact", "native"])
def test_a_weight_is_read_once_a_step_where_its_codes_are_multiplied(gemm, monkeypatch):
    """On a CPU, which has no tensor cores, the step ends at its first product."""
    asked, cfg = [], config("mxfp8")
    cfg = cfg.model_copy(update={"recipe": cfg.recipe.model_copy(update={"gemm": gemm})})

    def recorded(**options):
        asked.append(options["cache_weights"])
        return quantization(**options)

    monkeypatch.setattr(microbatches, "quantization", recorded)
    with suppress(UserError):
        next(trainer(cfg).steps())
    assert asked[0] == (gemm == "native")


def test_first_loss_is_the_logarithm_of_the_vocabulary():
    first = next(trainer(config(log_every=1)).steps())
    assert first.metrics["train_loss"] == pytest.approx(math.log(16), abs=1e-6)


def test_schedule_rises_stays_and_falls():
    train = config(steps=100, warmup=0.1, decay=0.4, lr=1.0, min_lr_fraction=0.1).train
    rates = [learning_rate(train, step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1) and rates[9:60] == [1.0] * 51
    assert rates[-1] == pytest.approx(0.1 + 0.9 / 40) and rates == sorted(rates[:10]) + rates[10:60] + sorted(
        rates[60:], reverse=True
    )


def test_microbatches_add_up_to_the_batch():
    """In FP32, where only the order of sums differs; under a low-precision recipe each part has its own scales."""
    whole, parts = (trainer(config("fp32", dtype="fp32", log_every=1, microbatches=n)) for n in (1, 4))
    for a, b in zip(whole.steps(), parts.steps(), strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_weights_are_quantized_once_for_all_microbatches_and_for_all_batches_of_an_evaluation(monkeypatch):
    seen, real = [], LinearCall.quantize

    def spy(self, tensor, x, **options):
        if (self.layer, tensor) == ("layers.0.mlp.fc1", "weight"):
            seen.append((self.context.step, options.get("rowwise"), options.get("columnwise")))
        return real(self, tensor, x, **options)

    monkeypatch.setattr(LinearCall, "quantize", spy)
    list(trainer(config(NVFP4, microbatches=2, steps=4)).steps())
    # At last the updated weight, for the two batches of an evaluation.
    assert seen == [*((step, "exact", "exact") for step in range(1, 5)), (5, "exact", None)]


@pytest.mark.parametrize("linear", ["bf16", NVFP4, DELAYED], ids=["bf16", "nvfp4", "delayed"])
def test_resume_equals_uninterrupted(linear, tmp_path):
    whole, sink = trainer(config(linear)), ListSink()
    list(whole.steps())
    half = trainer(config(linear))
    for done in half.steps():
        if done.step == 3:  # between two logs: the running mean is state too
            break
    sink.metric(2, {"train_loss": 0.0})
    save_checkpoint(half, tmp_path / "checkpoint", rows=sink.mark())
    sink.metric(4, {"train_loss": 0.0})
    convergence.run(config(linear), sink, tmp_path)
    resumed = trainer(config(linear))
    assert load_checkpoint(resumed, tmp_path / "checkpoint") and resumed.step == 8
    assert resumed.val_loss is not None  # by which a run that has no step left tells how it ended
    for (name, a), b in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert [m["step"] for m in sink.metrics if m["metric"] == "train_loss"] == [2, 4, 6, 8]
    files = sorted(p.name for p in (tmp_path / "checkpoint").iterdir())
    assert files == ["step_4.json", "step_4.pt", "step_8.json", "step_8.pt"]


SCHEDULE = [{"at": 0.25, "fprop": "bf16"}, {"at": 5, "linear": "mxfp8"}]
"""Eight steps: NVFP4 for 1 and 2, its forward in bf16 for 3 to 5, MXFP8 from 6 on."""
STAGES = [(1, 0.0), (3, 1.0), (6, 2.0)]


def inputs_by_step(trainer, until=8):
    seen = {}
    for done in trainer.steps():
        seen[done.step] = str(trainer.model.layers[0].attn.qkv.quantizers.input)
        if done.step == until:
            break
    return seen


def test_the_schedule_is_followed_to_the_step():
    rht = "bf16|nvfp4+rht"
    expected = dict(enumerate(["nvfp4+rht", "nvfp4+rht", rht, rht, rht, "mxfp8", "mxfp8", "mxfp8"], start=1))
    assert inputs_by_step(trainer(config(NVFP4, schedule=SCHEDULE))) == expected


def test_until_its_first_change_a_schedule_changes_nothing_and_then_it_does():
    plain, scheduled = trainer(config(NVFP4, log_every=1)), trainer(config(NVFP4, log_every=1, schedule=SCHEDULE))
    a, b = ([done.metrics["train_loss"] for done in t.steps()] for t in (plain, scheduled))
    assert a[:2] == b[:2] and a[2:] != b[2:]


@pytest.mark.parametrize("stop", [1, 2, 3, 5, 6])
def test_resume_across_changes_of_recipe_equals_uninterrupted(stop, tmp_path):
    whole, half = (trainer(config(NVFP4, schedule=SCHEDULE)) for _ in range(2))
    losses = [done.metrics.get("val_loss") for done in whole.steps()]
    inputs_by_step(half, until=stop)
    save_checkpoint(half, tmp_path)
    resumed = trainer(config(NVFP4, schedule=SCHEDULE))
    assert load_checkpoint(resumed, tmp_path)
    assert [done.metrics.get("val_loss") for done in resumed.steps()] == losses[stop:]
    for (name, a), b in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_the_schedule_is_in_the_manifest_and_in_the_metrics(tmp_path):
    sink = ListSink()
    convergence.run(config(NVFP4, schedule=SCHEDULE), sink, tmp_path)
    assert [(m["step"], m["value"]) for m in sink.metrics if m["metric"] == "recipe_stage"] == STAGES
    first, second = sink.facts["recipe_schedule"]
    assert (first["first_step"], second["first_step"]) == (3, 6)
    plan = first["gemm_plan"]["layers.0.attn.qkv"]
    assert plan["fprop"].startswith("bf16 x bf16") and plan["dgrad"].startswith("nvfp4+sr x nvfp4+2d")
    assert second["gemm_plan"]["layers.0.mlp.fc2"]["wgrad"].startswith("mxfp8 x mxfp8")
    assert "head" not in first["gemm_plan"] and sink.facts["gemm_plan"]["head"]["fprop"].startswith("bf16 x bf16")
    plain = ListSink()
    convergence.run(config(), plain, tmp_path / "plain")
    assert plain.facts["recipe_schedule"] == [] and not any(m["metric"] == "recipe_stage" for m in plain.metrics)


def factory(role):
    return "mxfp8" if role.name != "head" else "bf16"


@pytest.mark.feature("F14", "F168")
def test_a_factory_trains_as_the_sections_that_say_the_same():
    curves = []
    for recipe in ({"linear": "mxfp8"}, {"qfactory": f"{__name__}.factory"}):
        cfg = parse(config().model_dump(mode="json") | {"recipe": {"name": "r", **recipe}}, find_factory)
        curves.append([done.metrics.get("train_loss") for done in trainer(cfg).steps()])
    assert curves[0] == curves[1] and curves[0][-1] is not None


def test_runs_repeat_and_seeds_differ(tmp_path):
    def curve(cfg, folder):
        sink = ListSink()
        convergence.run(cfg, sink, tmp_path / folder)
        return [m["value"] for m in sink.metrics if m["metric"] == "train_loss"]

    assert curve(config(NVFP4), "a") == curve(config(NVFP4), "b")
    assert curve(config(), "c") != curve(config(seed=1), "d")


@pytest.mark.feature("F18")
def test_recipes_start_from_the_same_weights_and_batches():
    a, b = trainer(config("bf16")), trainer(config(NVFP4))
    assert all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))
    assert torch.equal(a.dataset.batch("train", 0, 5, 4, 32)[0], b.dataset.batch("train", 0, 5, 4, 32)[0])


@pytest.mark.parametrize("quantized", [False, True])
def test_init_noise_multiplies_every_weight_by_a_factor_that_the_seed_alone_sets(quantized):
    def weights(noise, seed=0):
        cfg = config("fp32" if not quantized else "mxfp8", seed=seed)
        model = cfg.model.model_copy(update={"init_noise": noise, "quantized_weights": quantized})
        built = build_model(cfg.model_copy(update={"model": model}), 16, cfg.recipe.build())
        find = lambda p: p.get_high_precision_init_val() if isinstance(p, HybridQuantizedTensor) else p.detach()  # noqa: E731
        return {name: find(p).float().cpu() for name, p in built.named_parameters()}

    plain, noisy, other = weights(0.0), weights(0.01), weights(0.01, seed=1)
    eps = {name: (noisy[name] / plain[name] - 1) / 0.01 for name in plain if plain[name].all()}
    assert len(eps) > 5 and all(torch.equal(noisy[name], plain[name]) for name in plain if not plain[name].any())
    every = torch.cat([values.flatten() for values in eps.values()])
    assert abs(every.mean()) < 0.05 and abs(every.std() - 1) < 0.05
    table = eps["embedding.weight"].flatten()
    assert abs(torch.corrcoef(torch.stack([table, plain["embedding.weight"].flatten()]))[0, 1]) < 0.2
    again = weights(0.01)
    assert all(torch.equal(again[name], noisy[name]) for name in noisy)
    assert not torch.equal(other["embedding.weight"] / weights(0.0, seed=1)["embedding.weight"], 1 + 0.01 * table)


def test_divergence_is_an_error_with_its_step(tmp_path):
    with pytest.raises(Diverged, match=r"loss is (nan|inf) at step"):
        convergence.run(config(lr=1e30, clip=1e30, steps=40), ListSink(), tmp_path)


def test_statistics_are_sampled_at_their_steps(tmp_path):
    sink = ListSink()
    convergence.run(config("mxfp8", stats={"every": 4, "gemm": True}), sink, tmp_path)
    assert {r["step"] for r in sink.tables["stats"]} == {4, 8}
    assert {r["layer"] for r in sink.tables["stats"]} == {
        "layers.0.attn.qkv", "layers.0.attn.proj", "layers.0.mlp.fc1", "layers.0.mlp.fc2", "head"
    }  # fmt: skip
    assert len(sink.tables["stats"]) == 2 * 5 * (6 + 3)
    without = ListSink()
    convergence.run(config("mxfp8", stats={"every": 4, "gemm": False}), without, tmp_path / "b")
    assert len(without.tables["stats"]) == 2 * 5 * 6
    assert without.metrics == sink.metrics  # looking changes nothing


def test_manifest_facts(tmp_path):
    sink = ListSink()
    convergence.run(config("nvfp4|mxfp8"), sink, tmp_path)
    assert sink.facts["steps"] == {"run": "eager", "reason": "there are no graphs on the CPU"}
    assert sink.facts["gemm_plan"]["layers.0.mlp.fc2"]["fprop"] == "nvfp4 x nvfp4: exact: bf16 operands, float32 GEMM"
    assert sink.facts["gemm_plan"]["head"]["wgrad"].startswith("bf16 x bf16")
    assert sink.facts["kernel_digest"] == FINGERPRINT
    assert sink.facts["device"] == "cpu" and len(sink.facts["data_hash"]) == 64


def test_the_manifest_says_what_is_kept_for_backward(tmp_path):
    nbytes = {}
    for linear, train in (
        ("bf16", {}),
        ("mxfp8", {}),
        ("mxfp8", {"microbatches": 2}),
        ("mxfp8", {"recompute": "layer"}),
    ):
        sink = ListSink()
        convergence.run(config(linear, steps=1, **train), sink, tmp_path / f"{linear}{train}")
        nbytes[linear, *train] = sink.facts["saved_for_backward"]
    names = ["layers.*.attn.qkv", "layers.*.attn.proj", "layers.*.mlp.fc1", "layers.*.mlp.fc2", "head"]
    assert nbytes["mxfp8",]["input_bytes_per_element"] == dict.fromkeys(names[:4], 1 + 1 / 32) | {"head": 2.0}
    tokens, elements = 4 * 32, 3 * 32 + 96  # a token: three inputs of width 32, and of fc2 the hidden width
    saved = nbytes["bf16",]["bytes"] - nbytes["mxfp8",]["bytes"]
    assert saved == tokens * elements * (2 - 1 - 1 / 32)
    assert nbytes["mxfp8",]["bytes_per_token"] == nbytes["mxfp8",]["bytes"] / tokens
    assert nbytes["mxfp8", "microbatches"]["bytes"] < 0.52 * nbytes["mxfp8",]["bytes"]
    assert set(nbytes["mxfp8", "recompute"]) == {"input_bytes_per_element"}


def test_throughput_counts_tokens_since_its_start():
    times = iter([0.0, 2.0])
    throughput = Throughput(100, clock=lambda: next(times))
    assert throughput.at(10) is None
    assert throughput.at(20) == 500.0


@pytest.mark.gpu
@pytest.mark.parametrize("linear", ["bf16", "mxfp8", NVFP4], ids=str)
def test_gpu_trains_repeats_and_follows_the_cpu(linear, tmp_path):
    def losses(device, folder):
        sink = ListSink()
        convergence.run(config(linear, device=device, log_every=1), sink, tmp_path / folder)
        return [m["value"] for m in sink.metrics if m["metric"] == "train_loss"]

    first, second, cpu = losses("cuda", "a"), losses("cuda", "b"), losses("cpu", "c")
    assert first == second
    assert first == pytest.approx(cpu, abs=5e-3)


@pytest.mark.parametrize("name", ["delayed_scaling", "nvfp4_linear_fp8_dpa"])
def test_packaged_recipes_with_delayed_scaling_see_every_step(name, tmp_path):
    """With microbatches, statistics and evaluations between."""
    fields = config(stats={"every": 2}, microbatches=2).model_dump(mode="json")
    cfg, sink = parse(fields | {"recipe": load_recipe(name)}), ListSink()
    convergence.run(cfg, sink, tmp_path)
    training = trainer(cfg)
    assert load_checkpoint(training, tmp_path / "checkpoint")
    states = {key: module for key, module in training.model.named_modules() if isinstance(module, DelayedState)}
    slots = {key.partition(".states.")[2].rpartition("_")[0] for key in states}
    assert slots == ({"s", "dp"} if "dpa" in name else {"input", "weight", "grad_output"})
    for key, state in states.items():
        steps = 8 - ("grad_output" in key)  # behind a head of zeros the first gradient is zero
        assert (state.step, int(state.history.count_nonzero())) == (8, min(steps, len(state.history))), key
        assert state.amax > 0, key
    assert {row["step"] for row in sink.tables["stats"]} == {2, 4, 6, 8}
