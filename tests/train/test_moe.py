"""Training a GPT whose MLPs are mixtures of experts: ways to the same bytes, what a run says of its experts."""

import pytest
import torch

from hqsweep.config.job import gemm_modules, grouped_shapes, linear_shapes, parse
from hqsweep.config.model import ModelConfig, expert_width
from hqsweep.errors import UserError
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink
from hqsweep.nn import GroupedLinear
from hqsweep.quant import GroupedTensor
from hqsweep.sweep.engine.launch import plan
from hqsweep.train import data
from hqsweep.train.build import make_optimizer
from hqsweep.train.checkpoint import load_checkpoint, save_checkpoint
from hqsweep.train.loop import Trainer
from hqsweep.train.model import GPTAdapter, build_model

pytestmark = pytest.mark.slow

COMPOSER2 = {
    "input": "nvfp4+row_scaled|mxfp8@rowwise_dequantized", "weight": "nvfp4|mxfp8@rowwise_dequantized",
    "grad_output": "mxfp8",
}  # fmt: skip
EXPERTS = 3


def config(grouped="mxfp8", *, stats=None, model=None, recipe=None, **train):
    return parse(
        {
            "job": "convergence", "sweep": "t", "stats": stats or {"every": 0},
            "recipe": {"name": "r", "linear": "mxfp8", "grouped_linear": grouped, **(recipe or {})},
            "model": {"dim": 32, "layers": 2, "heads": 2, "experts": EXPERTS, "first_moe_layer": 1,
                      "shared_expert": True, **(model or {})},
            "data": {"source": "markov", "markov": {"length": 20000}},
            "train": {"steps": 4, "batch": 4, "context": 32, "eval_batches": 1, "log_every": 1, "eval_every": 4,
                      "device": "cpu", **train},
        }
    )  # fmt: skip


def trainer(cfg):
    return Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), torch.device("cpu"))


def trained(cfg, training=None):
    """Metrics of every step, and the masters at the end."""
    training = training or trainer(cfg)
    metrics = [done.metrics for done in training.steps()]
    return metrics, [training.optimizer.master_param(p).detach().clone() for p in training.model.parameters()]


def assert_same(a, b):
    assert a[0] == b[0]
    assert all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def test_names_and_shapes_are_known_before_building():
    cfg = config()
    model = trainer(cfg).model
    assert [(m.name, m.in_features, m.out_features) for m in model.grouped_linears()] == grouped_shapes(cfg.model)
    assert [(m.name, m.weight.shape[1], m.weight.shape[0]) for m in model.linears()] == linear_shapes(cfg.model, 16)
    named = {module.name for module in gemm_modules(cfg.model, 16, 4, 32)}
    assert {"layers.1.mlp.fc1", "layers.1.mlp.shared.fc2", "layers.0.mlp.fc2"} <= named
    assert expert_width(ModelConfig(dim=64)) == 96 and expert_width(ModelConfig(dim=64, expert_ffn=40)) == 40


def test_every_matrix_decays_and_nothing_else():
    model = trainer(config()).model
    groups = make_optimizer(GPTAdapter(model, config().model), config().train).param_groups
    matrices, others = (group["params"] for group in groups)
    assert model.layers[1].mlp.router.weight.shape in [p.shape for p in matrices]
    assert all(p.dim() >= 2 for p in matrices) and [p.shape for p in others if p.dim() > 1] == [(16, 32)]


@pytest.mark.parametrize(
    "options", [{"recompute": "layer"}, {"recompute": "attention"}, {"offload": True}], ids=lambda o: next(iter(o))
)
def test_saving_less_changes_no_byte(options):
    assert_same(trained(config(COMPOSER2)), trained(config(COMPOSER2, **options)))


@pytest.mark.feature("F79", "H32")
@pytest.mark.parametrize("grouped", [COMPOSER2, "fp8_delayed"], ids=["composer2", "delayed"])
@pytest.mark.parametrize("held", [False, True])
def test_a_resumed_training_is_the_uninterrupted_one(grouped, held, tmp_path):
    cfg = config(grouped, model={"quantized_weights": held})
    first, whole = trainer(cfg), trained(cfg)
    for done in first.steps():
        if done.step == 2:
            break
    save_checkpoint(first, tmp_path)
    second = trainer(cfg)
    load_checkpoint(second, tmp_path)
    metrics, masters = trained(cfg, second)
    assert_same((whole[0][2:], whole[1]), (metrics, masters))
    weight = second.model.layers[1].mlp.fc1.weight
    assert isinstance(weight, GroupedTensor) == held


@pytest.mark.parametrize("grouped", [COMPOSER2, "nvfp4"], ids=["composer2", "nvfp4"])
def test_held_weights_train_as_those_quantized_at_every_use(grouped):
    stats = {"every": 4}
    trainings = [trainer(config(grouped, stats=stats, model={"quantized_weights": held})) for held in (False, True)]
    rows = []
    for each in trainings:
        *_, last = each.steps()
        rows.append(last.stats)
    for a, b in zip(*(each.model.parameters() for each in trainings), strict=True):
        assert torch.equal(trainings[0].optimizer.master_param(a), trainings[1].optimizer.master_param(b))
    assert rows[0] == rows[1] and any(row["layer"] == "layers.1.mlp.fc2.0" for row in rows[0])


def test_microbatches_add_up_to_the_batch():
    """In FP32 without the auxiliary loss, which is that of each part."""
    whole, parts = (
        trainer(config("fp32", recipe={"linear": "fp32"}, model={"load_balance": 0.0}, dtype="fp32", microbatches=n))
        for n in (1, 2)
    )
    for a, b in zip(whole.steps(), parts.steps(), strict=True):
        assert a.loss == pytest.approx(b.loss, rel=1e-5)
        assert a.metrics["expert_load_max"] == pytest.approx(b.metrics["expert_load_max"], rel=0.05)


def test_the_auxiliary_loss_is_trained_on_and_no_part_of_val_loss():
    """Its weight changes the router at once; with the weight large enough loads become more equal. The first train_loss
    is the logarithm of the vocabulary plus it."""
    first = next(trainer(config("fp32", model={"load_balance": 0.5})).steps()).metrics
    assert first["train_loss"] == pytest.approx(torch.tensor(16.0).log().item() + 0.5 * first["aux_loss"], abs=1e-5)
    uneven = config("fp32", model={"load_balance": 0.0}, steps=30, lr=1e-2)
    even = config("fp32", model={"load_balance": 1.0}, steps=30, lr=1e-2)
    loads = []
    for cfg in (uneven, even):
        training = trainer(cfg)
        with torch.no_grad():
            training.model.layers[1].mlp.router.weight[0] += 0.3 * training.model.layers[1].mlp.router.weight[1].sign()
        *_, last = (done.metrics for done in training.steps())
        loads.append(last["expert_load_max"])
        assert 1 <= last["expert_load_max"] <= EXPERTS
    assert last["val_loss"] < last["train_loss"] - 0.5 and loads[1] < loads[0]


def test_a_dense_model_says_nothing_of_experts():
    first = next(trainer(config(model={"experts": 0, "first_moe_layer": 0, "shared_expert": False})).steps())
    assert set(first.metrics) == {"train_loss", "grad_norm", "lr"}


def test_recipes_change_experts_by_schedule_name_and_layer():
    recipe = {
        "overrides": [{"name": "layers.1.mlp.fc2", "grouped_linear": "bf16"}, {"layers": "last(1)", "linear": "fp32"}],
        "schedule": [{"at": 2, "grouped_linear": "nvfp4"}],
    }
    training = trainer(config(recipe=recipe, model={"first_moe_layer": 0}))
    grouped = {module.name: module for module in training.model.modules() if isinstance(module, GroupedLinear)}
    assert {name: str(module.quantizers.input) for name, module in grouped.items()} == {
        "layers.0.mlp.fc1": "mxfp8", "layers.0.mlp.fc2": "mxfp8", "layers.1.mlp.fc1": "fp32", "layers.1.mlp.fc2": "fp32"
    }  # fmt: skip
    list(training.steps())
    assert str(grouped["layers.0.mlp.fc1"].quantizers.weight) == "nvfp4"


def test_a_run_says_how_experts_are_multiplied_and_what_they_keep(tmp_path):
    sink = ListSink()
    convergence.run(config(COMPOSER2, stats={"every": 4}), sink, tmp_path)
    plan = sink.facts["gemm_plan"]["layers.1.mlp.fc1"]
    assert plan["fprop"] == "nvfp4+row_scaled x nvfp4: exact: bf16 operands, float32 GEMM, for each expert"
    nbytes = sink.facts["saved_for_backward"]["input_bytes_per_element"]
    assert nbytes["layers.*.mlp.shared.fc1"] == nbytes["layers.*.mlp.fc1"] == 1 + 1 / 32
    routed = [row for row in sink.tables["stats"] if row["tensor"] == "routed"]
    assert [row["layer"] for row in routed] == [f"layers.1.mlp.{e}" for e in range(EXPERTS)]
    assert sum(row["tokens"] for row in routed) == 4 * 32 * 2
    assert {"aux_loss", "expert_load_max"} <= {row["metric"] for row in sink.metrics}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"top_k": 4}}, r"model\.top_k: 4 of 3 experts; give 1 to 3"),
        ({"model": {"first_moe_layer": 2}}, r"model\.first_moe_layer: 2, but the last layer is 1"),
        ({"grouped": {"input": "nvfp4+rht", "weight": "nvfp4", "grad_output": "nvfp4"}},
         r"layers\.1\.mlp\.fc1 wgrad: .*nvfp4\+rht"),
        ({"grouped": "nvfp4", "model": {"expert_ffn": 40}}, r"layers\.1\.mlp\.fc2 fprop: the contracted axis has 40"),
        ({"model": {"quantized_weights": True}, "recipe": {"schedule": [{"at": 2, "grouped_linear": "nvfp4"}]}},
         r"from step 3 on layers\.1\.mlp\.fc1/grouped_linear/weight is nvfp4"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(change, message):
    with pytest.raises(UserError, match=message):
        config(**change)


def test_the_sweep_at_the_size_of_a_gpu_has_the_size_that_its_file_says():
    (small, *_), (large, *_) = (plan(["conf=moe", *words]).configs for words in ([], ["model=moe_100m"]))
    assert (small.model.dim, small.model.experts) == (64, 4)
    with torch.device("meta"):
        model = build_model(large, 256, large.recipe.build())
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(97e6, rel=0.01)
