"""gemm=native in a run: what the machine cannot multiply is told before a model is built; plans say who computes."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from cases import LINEARS

from hqsweep.config.job import ConvergenceConfig, parse
from hqsweep.errors import UserError
from hqsweep.gemm import native
from hqsweep.gemm.exact import mm_t
from hqsweep.jobs import convergence
from hqsweep.jobs.probe.job import find_matrices, parse_quantizers, probe
from hqsweep.jobs.sink import ListSink
from hqsweep.jobs.training_report import stage_plans, trainer_fields
from hqsweep.nn import GroupedLinear
from hqsweep.recipe import parse_recipe
from hqsweep.sweep.store.names import run_id
from hqsweep.train import data
from hqsweep.train.loop import Trainer

CPU = torch.device("cpu")
FP8_E5M2 = LINEARS["fp8_current"]


def config(
    linear: object = "fp8_current", *, schedule: tuple = (), device: str = "cpu", context: int = 36,
    stats: dict | None = None, **recipe: object,
) -> ConvergenceConfig:  # fmt: skip
    return parse(
        {
            "job": "convergence", "sweep": "t", "stats": stats or {"every": 0},
            "recipe": {"name": "r", "linear": linear, "schedule": list(schedule), **recipe},
            "model": {"dim": 32, "layers": 1, "heads": 2},
            "data": {"source": "markov", "markov": {"length": 20000}},
            "train": {"steps": 4, "batch": 4, "context": context, "eval_batches": 1, "device": device},
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    "recipe", [{"gemm": "native"}, {"schedule": ({"at": 2, "gemm": "native"},)}], ids=["at once", "later"]
)
def test_without_a_gpu_native_is_refused_before_a_model_is_built(recipe, tmp_path, monkeypatch):
    monkeypatch.delattr(convergence, "Trainer")
    with pytest.raises(UserError, match=r"recipe: gemm=native needs a GPU of compute capability 8.9 .* is on the CPU;"):
        convergence.run(config(**recipe), ListSink(), tmp_path)


def test_all_that_a_device_has_no_product_for_is_told_at_once(monkeypatch):
    monkeypatch.setattr(native, "capability_of", lambda device: (9, 0))
    convergence.check_native(config("mxfp8"), CPU, 16)  # gemm=exact runs anywhere
    convergence.check_native(config(gemm="native"), CPU, 16)
    linear = {"input": "fp8_block|mxfp8", "weight": "fp8_block", "grad_output": "fp8_block|mxfp8"}
    with pytest.raises(UserError) as raised:
        convergence.check_native(config(linear, head="fp8_current", gemm="native"), CPU, 17)
    for part in (
        "layers.0.attn.qkv wgrad: grad_output columnwise mxfp8 cannot meet input columnwise mxfp8 under gemm=native:"
        " sm_90 has no product for mxfp8; it has: fp8_block, fp8_current",
        "head fprop: input rowwise fp8_current cannot meet weight rowwise fp8_current under gemm=native: tensor cores"
        " take multiples of 16, which rows of the second operand (17) is not",
        "head dgrad: grad_output rowwise fp8_current cannot meet weight columnwise fp8_current under gemm=native:"
        " tensor cores take multiples of 16, which the contracted axis (17) is not",
    ):
        assert part in str(raised.value)


def test_a_run_says_what_it_is_at_before_its_first_step(tmp_path):
    sink, said = ListSink(), []
    sink.phase = said.append
    sink.progress = lambda step, *rest, **where: said.append(step)
    convergence.run(config(), sink, tmp_path)
    assert said == ["loading data", "building the model", "first step", None, 1, 2, 3, 4]


def said_of_data(sink: ListSink) -> list[str]:
    return [line for line in sink.facts.get("warnings", []) if not line.startswith("barely trained")]


def test_a_run_that_has_hardly_learnt_says_so(tmp_path):
    sink = ListSink()
    convergence.run(config(), sink, tmp_path)
    assert [line for line in sink.facts["warnings"] if "barely trained: the validation loss does not end 0.1" in line]
    dataset = data.loaded(config().data)
    entropy = dataset.facts["unigram_entropy_nats"]
    assert dataset.untrained(entropy - 0.11) == [] and dataset.untrained(None) == []


STEPS = r"step 4 of 4: train_loss [\d.]+, [\d,]+ tokens/s\n"
"""What the log has of the steps of a run that logs its last one."""


def test_a_run_that_repeats_its_data_says_so_in_its_manifest_and_its_log(tmp_path, capsys):
    cfg, sink = config(), ListSink()
    convergence.run(cfg, sink, tmp_path / "once")
    assert sink.facts["epochs"] == 4 * 4 * 36 / 20_000 and not said_of_data(sink)
    assert re.fullmatch(STEPS, capsys.readouterr().out)
    short = cfg.data.model_copy(update={"markov": cfg.data.markov.model_copy(update={"length": 400})})
    convergence.run(cfg.model_copy(update={"data": short}), sink, tmp_path / "often")
    assert sink.facts["epochs"] == 1.44
    (line,) = said_of_data(sink)
    assert line.startswith("training reads its 400 tokens 1.44 times")
    assert re.fullmatch(re.escape(f"warning: {line}\n") + STEPS, capsys.readouterr().out)


def test_plans_say_native_where_it_is(monkeypatch):
    schedule = ({"at": 2, "gemm": "native"}, {"at": 3, "fprop": "bf16"})
    cfg = config(schedule=schedule)
    trainer = Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), CPU)
    monkeypatch.setattr(native, "capability_of", lambda device: (10, 0))
    fields = trainer_fields(trainer)
    pair, exact = "fp8_current x fp8_current", "exact: bf16 operands, bfloat16 tensor cores, float32 accumulation"
    tensor_cores = "native: tensor cores of sm_100 through torch._scaled_mm, not yet run on such hardware"
    assert fields["gemm_plan"]["layers.0.mlp.fc2"]["wgrad"] == f"{pair}: {exact}"
    second, third = (stage["gemm_plan"] for stage in fields["recipe_schedule"])
    assert second["layers.0.mlp.fc2"]["wgrad"] == f"{pair}: {tensor_cores}" and "head" not in second
    assert third["layers.0.attn.qkv"]["fprop"] == f"bf16 x bf16: {exact}"
    assert third["layers.0.attn.qkv"]["dgrad"] == f"{pair}: {tensor_cores}"


def test_plans_are_those_of_quantized_attention_too():
    cfg = config(dpa="mxfp8", schedule=({"at": 2, "dpa": "bf16"},), context=32)
    fields = trainer_fields(Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), CPU))
    plan = fields["gemm_plan"]["layers.0.attn.dpa"]
    assert plan["pv"] == "mxfp8 x mxfp8: exact: bf16 operands, float32 GEMM" and len(plan) == 6
    assert fields["recipe_schedule"] == [{"first_step": 3, "gemm_plan": {"layers.0.attn.dpa": {}}}]


@pytest.mark.feature("F57")
def test_a_training_follows_the_schedule_of_modes(monkeypatch):
    modes = {step: set() for step in range(1, 5)}
    cfg = config(schedule=({"at": 2, "gemm": "native"}, {"at": 3, "gemm": "exact"}))
    trainer = Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), CPU)

    def spy(a, b, **options):
        modes[trainer.step].add((str(a.format), str(b.format)))
        return mm_t(a, b, **options)

    monkeypatch.setattr(native, "mm_t_native", spy)
    losses = [done.metrics.get("train_loss") for done in trainer.steps()]
    high, low = ("bf16", "bf16"), ("fp8_current", "fp8_current")
    assert modes == {1: set(), 2: set(), 3: {high, low}, 4: set()}
    plain = config()
    others = Trainer(plain, data.load(plain.data), plain.recipe.build(), CPU).steps()
    assert losses == [done.metrics.get("train_loss") for done in others]


@pytest.mark.gpu
def test_a_training_on_tensor_cores_is_near_the_exact_one():
    """Products of Hopper's FP8 tensor cores keep fewer bits while they add; the losses show it in later digits."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no tensor cores for FP8")
    losses = []
    for gemm in ("exact", "native"):
        cfg = config(FP8_E5M2, gemm=gemm, device="cuda")
        trainer = Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), torch.device("cuda"))
        plan = trainer_fields(trainer)["gemm_plan"]["layers.0.mlp.fc2"]["dgrad"]
        assert plan.startswith(f"fp8_current+e5m2 x fp8_current: {gemm}: ")
        convergence.check_native(cfg, trainer.device, trainer.dataset.vocab_size)
        losses.append([done.loss for done in trainer.steps()][-1])
    assert losses[1] != losses[0] and losses[1] == pytest.approx(losses[0], abs=0.01)


def test_the_operands_of_a_step_are_written_for_the_probe(tmp_path):
    cfg = config("mxfp8", stats={"every": 0, "capture_at": 2})
    sink, whole = ListSink(), ListSink()
    convergence.run(cfg, sink, tmp_path)
    convergence.run(config("mxfp8"), whole, tmp_path / "other")
    assert sink.metrics == whole.metrics
    file = tmp_path / "captured" / "step_2.safetensors"
    assert sorted(file.parent.iterdir()) == [file.with_suffix(".json"), file]
    linears = ("layers.0.attn.qkv", "layers.0.attn.proj", "layers.0.mlp.fc1", "layers.0.mlp.fc2", "head")
    matrices = {matrix.name: matrix for matrix in find_matrices(file)[0]}
    assert set(matrices) == {f"{name}.{tensor}" for name in linears for tensor in ("input", "weight", "grad_output")}
    assert matrices["head.input"].shape == (4 * 36, 32) and matrices["head.weight"].shape == (16, 32)
    sampled = [
        row for row in sink.tables["stats"] if row["layer"] == "layers.0.attn.proj" and row["direction"] != "output"
    ]
    assert len(sampled) == 6
    for row in sampled:  # made in the training, from the tensors themselves
        rows = probe(matrices[f"layers.0.attn.proj.{row['tensor']}"], parse_quantizers(["mxfp8"]))
        (same,) = (r for r in rows if r["direction"] == row["direction"])
        assert (same["sqnr_db"], same["amax"]) == (row["sqnr_db"], row["amax"])


def test_other_formats_are_measured_beside_and_change_nothing(tmp_path):
    sink, plain = ListSink(), ListSink()
    cfg = config("mxfp8", stats={"every": 2, "what_if": ["nvfp4", "mxfp4+sr"]})
    convergence.run(cfg, sink, tmp_path)
    convergence.run(config("mxfp8", stats={"every": 2}), plain, tmp_path / "other")
    assert sink.metrics == plain.metrics and sink.tables["stats"] == plain.tables["stats"]
    tensors = [row for row in plain.tables["stats"] if row["direction"] != "output"]
    others = sink.tables["what_if"]
    assert len(others) == 2 * len(tensors) and {row["format"] for row in others} == {"nvfp4", "mxfp4+sr"}
    eight_bits = {(row["step"], row["layer"], row["tensor"], row["direction"]): row["sqnr_db"] for row in tensors}
    for row in others:
        in_mxfp8 = eight_bits[row["step"], row["layer"], row["tensor"], row["direction"]]
        assert row["sqnr_db"] < in_mxfp8 or in_mxfp8 == math.inf
    assert sum(sqnr < math.inf for sqnr in eight_bits.values()) > len(eight_bits) / 2
    assert run_id(cfg.model_dump(mode="json")) != run_id(config("mxfp8", stats={"every": 2}).model_dump(mode="json"))


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        ({"what_if": ["nvfp5"]}, "format 'nvfp5': unknown name 'nvfp5'"),
        ({"what_if": ["fp8_delayed"]}, "fp8_delayed has no error of its own; give fp8_current"),
        ({"what_if": ["nvfp4", "nvfp4"]}, "has a format twice"),
        ({"what_if": "nvfp4", "every": 0}, "no step is sampled, as stats.every is 0"),
    ],
)
def test_formats_that_cannot_be_measured_beside_are_refused(stats, message):
    with pytest.raises(UserError, match=message):
        config(stats=stats)


def test_a_step_that_never_comes_is_not_captured():
    with pytest.raises(UserError, match=r"stats\.capture_at: step 5 is after the last; give 1 to 4"):
        config(stats={"every": 0, "capture_at": 5})


def test_plans_of_grouped_linears_are_those_of_experts():
    recipe = parse_recipe({"linear": "mxfp8"})
    model = torch.nn.Sequential(GroupedLinear(2, 32, 32, name="experts", recipe=recipe))
    whole = SimpleNamespace(of_all_stages=lambda by_module: by_module)
    trainer = SimpleNamespace(model=model, microbatches=whole, device=torch.device("cpu"))
    plans = stage_plans(trainer, SimpleNamespace(recipe=recipe))
    expected = "mxfp8 x mxfp8: exact: bf16 operands, float32 GEMM, for each expert"
    assert plans == {"experts": dict.fromkeys(("fprop", "dgrad", "wgrad"), expected)}
