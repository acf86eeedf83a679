"""The typed config: defaults agree with the YAML, every recipe of the zoo builds, every fault is told in one line."""

from importlib import resources

import pytest
from pydantic import ValidationError

from hqsweep.config import engine as config_engine
from hqsweep.config import job
from hqsweep.config.job import ConvergenceConfig, ParityConfig, parse
from hqsweep.config.section import leaves, sections
from hqsweep.config.train import TOKENS_VOCAB
from hqsweep.errors import UserError
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink
from hqsweep.recipe.argument import parse_recipe
from hqsweep.recipe.factories import factory_name
from hqsweep.recipe.sectioned import Recipe
from hqsweep.sweep.engine.launch import plan
from hqsweep.sweep.grid.compose import expand
from tests.support.walk import walk

# TransformerEngine's factory of the same name (high_precision is bf16), as its documentation states it: input, weight,
# grad_output of linears, each ROW|COL@SOURCE. RHT acts columnwise only. Below the line: hqsweep's own.
# compat/test_quantizers.py holds the first ones against factories written for TransformerEngine.
ZOO = {
    "bf16": ("bf16", "bf16", "bf16"),
    "current_scaling": ("fp8_current", "fp8_current", "fp8_current+e5m2"),
    "float8_block_scaling": ("fp8_block", "fp8_block+2d", "fp8_block"),
    "mxfp8": ("mxfp8", "mxfp8", "mxfp8"),
    "nvfp4": ("nvfp4+rht", "nvfp4+2d", "nvfp4+rht+sr"),
    "high_precision_fwd_mxfp8_bwd": ("bf16|mxfp8", "bf16|mxfp8", "mxfp8"),
    "mxfp8_fwd_nvfp4_bwd": ("mxfp8|nvfp4+rht", "mxfp8|nvfp4@rowwise_dequantized", "nvfp4+rht+sr"),
    "nvfp4_1d_weight": ("nvfp4+rht", "nvfp4@rowwise_dequantized", "nvfp4+rht+sr"),
    "mxfp8_fwd_high_precision_bwd": (*["mxfp8|bf16@rowwise_dequantized"] * 2, "bf16"),
    "nvfp4_row_scaled_fwd_mxfp8_bwd": ("mxfp8", "mxfp8", "mxfp8"),  # that is for grouped linears
    "nvfp4_row_scaled_fwd_mxfp8_bwd_original": ("mxfp8", "mxfp8", "mxfp8"),  # that too
    "nvfp4_row_scaled_fwd_high_precision_bwd": (
        "nvfp4+row_scaled|bf16@rowwise_dequantized", "nvfp4|bf16@rowwise_dequantized", "bf16"
    ),
    "high_precision": ("bf16", "bf16", "bf16"),
    "delayed_scaling": ("fp8_delayed", "fp8_delayed", "fp8_delayed+e5m2"),
    "nvfp4_linear_fp8_dpa": ("nvfp4+rht", "nvfp4+2d", "nvfp4+rht+sr"),  # and sections for attention
    "nvfp4_linear_mxfp8_dpa": ("nvfp4+rht", "nvfp4+2d", "nvfp4+rht+sr"),  # too
    # ----
    "nvfp4_row_scaled_fwd_mxfp8_bwd_dense": (
        "nvfp4+row_scaled|mxfp8@rowwise_dequantized", "nvfp4|mxfp8@rowwise_dequantized", "mxfp8"
    ),
    "nvfp4_fwd_mxfp8_bwd_original": ("nvfp4|mxfp8", "nvfp4|mxfp8", "mxfp8"),
    "nvfp4_fwd_mxfp8_bwd_dequantized": (*["nvfp4|mxfp8@rowwise_dequantized"] * 2, "mxfp8"),
    "nvfp4_4over6": ("nvfp4+4over6|nvfp4+rht", "nvfp4+2d+4over6", "nvfp4+rht+sr"),
    "mxfp4": ("mxfp4", "mxfp4", "mxfp4"),
    "mxfp4_floor": ("mxfp4+floor", "mxfp4+floor", "mxfp4+floor"),
    "nvfp4_tensor": ("nvfp4+tensor", "nvfp4+tensor", "nvfp4+tensor"),
    "deepseek_v3": (
        "fp8_block+fp32_scale@rowwise_dequantized", "fp8_block+2d+fp32_scale",
        "fp8_block+fp32_scale",
    ),
    "mxfp4_wgrad_bf16": ("mxfp4|bf16", "mxfp4", "mxfp4|bf16"),
    "mxfp4_wgrad_nvfp4_rht": ("mxfp4|nvfp4+rht", "mxfp4", "mxfp4|nvfp4+rht"),
    "quartet2_like": (
        *["nvfp4+4over6|nvfp4+rht32+eden@rowwise_dequantized"] * 2,
        "nvfp4+rht32+eden|nvfp4+rht32+eden",
    ),
    "tetrajet_like": (*["mxfp4@rowwise_dequantized"] * 2, "mxfp4"),
    "tetrajet2_like": (
        "nvfp4|nvfp4+rht+sr@rowwise_dequantized", "nvfp4|nvfp4+sr@rowwise_dequantized", "nvfp4+rht+sr"
    ),
    "ufp4_like": ("nvfp4+rht", "nvfp4", "nvfp4+rht+sr"),
    "nvfp4_ends_bf16": ("nvfp4+rht", "nvfp4+2d", "nvfp4+rht+sr"),  # and overrides
    "nvfp4_healed": ("nvfp4+rht", "nvfp4+2d", "nvfp4+rht+sr"),  # and a schedule
    "nvfp4_healed_fprop": ("nvfp4+rht", "nvfp4+2d", "nvfp4+rht+sr"),  # too
    "nvfp4_fc2_mxfp8": ("nvfp4+rht", "nvfp4+2d", "nvfp4+rht+sr"),  # and overrides
    "mxfp6_e2m3": ("mxfp6_e2m3", "mxfp6_e2m3", "mxfp6_e2m3"),
    "mxfp6_e3m2": ("mxfp6_e3m2", "mxfp6_e3m2", "mxfp6_e3m2"),
    "mxfp8_weight_mxfp4": ("mxfp8", "project(mxfp4) > mxfp8", "mxfp8"),
    "float8_block_weight_mxfp4": ("fp8_block", "project(mxfp4) > fp8_block+2d", "fp8_block"),
    "mxfp8_dpa": ("mxfp8", "mxfp8", "mxfp8"),  # and sections for attention
    "nvfp4_dpa": ("nvfp4+rht", "nvfp4+2d", "nvfp4+rht+sr"),  # too
    "mxfp8_e5m2_grad": ("mxfp8", "mxfp8", "mxfp8+e5m2"),
    "fp32": ("fp32", "fp32", "fp32"),
    "fp8_row": ("fp8_row+pow2", "fp8_row+pow2", "fp8_row+pow2"),
    "fp8_row_gw_hp": ("fp8_row+pow2|bf16", "fp8_row+pow2|fp8_current+pow2", "fp8_row+pow2|bf16"),
}  # fmt: skip


NVFP4_HALF = {"input": "nvfp4", "weight": "nvfp4+rht", "grad_output": "nvfp4"}
"""dgrad would have the Hadamard transform on one side."""


def smallest(**extra: object) -> dict:
    """The least that a convergence run needs."""
    return {"job": "convergence", "sweep": "s", "recipe": {"name": "r", "linear": "mxfp8"}} | extra


def names(group: str) -> set[str]:
    return {f.name.removesuffix(".yaml") for f in resources.files("hqsweep.conf").joinpath(group).iterdir()}


@pytest.mark.feature("F20", "F144")
@pytest.mark.parametrize("name", ZOO)
def test_zoo_recipe(name: str) -> None:
    (point,) = expand("convergence", [f"recipe={name}"]).points
    recipe = parse(point.config).recipe
    assert recipe.name == name
    assert tuple(recipe.linear.values()) == ZOO[name]
    assert parse(point.config | {"recipe": recipe.model_dump()}).recipe == recipe
    assert str(recipe.build().linear.input) == ZOO[name][0]
    assert point.config["recipe"]["linear"].keys() == {"input", "weight", "grad_output"}


def test_zoo_is_complete() -> None:
    assert names("recipe") == set(ZOO)


@pytest.mark.parametrize(
    ("group", "option"),
    [(g, o) for g in ("model", "data", "train", "stats", "engine") for o in sorted(names(g))] + [("track", "none")],
)
def test_packaged_options_are_valid(group: str, option: str, tmp_path) -> None:
    needs = dict.fromkeys(("text", "tokens", "shards"), f"data.path={tmp_path}")
    needs |= {"hf": f"model.path={tmp_path}", "factory": "model._target_=my.build"}
    words = [f"{group}={option}", *([needs[option]] if option in needs else [])]
    parse(expand("convergence", words).points[0].config)


def test_yaml_states_every_leaf_with_the_default_of_the_model() -> None:
    (point,) = expand("convergence", ["track=none"]).points
    default = parse(smallest(sweep="convergence")).model_dump(mode="json")
    assert point.config | {"recipe": None, "fork": None} == default | {"recipe": None}


@pytest.mark.slow
@pytest.mark.parametrize("conf", ["quickstart", "stdlib", "markov", "moe", "parity", "calibrate", "fork"])
def test_packaged_sweeps_are_valid(conf: str) -> None:
    assert all(parse(point.config).sweep == conf for point in expand(conf).points)


def test_a_dump_parses_to_the_same_config() -> None:
    for conf in ("convergence", "parity", "calibrate"):
        config = parse(expand(conf).points[0].config)
        assert parse(config.model_dump(mode="json")) == config


def test_equal_recipes_have_equal_dumps() -> None:
    fields = {"rowwise": "mxfp8", "columnwise": "mxfp8"}
    tensors = dict.fromkeys(("input", "weight", "grad_output"), fields)
    spellings = ["mxfp8", "mxfp8|mxfp8@original", fields, tensors]
    dumps = [parse(smallest(recipe={"name": "r", "linear": s})).model_dump_json() for s in spellings]
    assert len(set(dumps)) == 1


def test_types_are_told_apart_by_job() -> None:
    assert isinstance(parse(smallest()), ConvergenceConfig)
    assert isinstance(parse(expand("parity").points[0].config), ParityConfig)


def test_configs_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        parse(smallest()).train.steps = 3


def test_vocabulary_estimates(tmp_path) -> None:
    def estimate(**data: object) -> int:
        return parse(smallest(data=data)).data.vocab_estimate

    assert estimate() == 256
    assert estimate(source="markov", markov={"vocab": 12}) == 12
    assert estimate(source="tokens", path=str(tmp_path)) == TOKENS_VOCAB


def test_tracker_is_wandb_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_engine, "find_spec", lambda name: object())
    assert parse(smallest(track={"kind": "auto"})).track.kind == "wandb"
    monkeypatch.setattr(config_engine, "find_spec", lambda name: None)
    assert parse(smallest(track={"kind": "auto"})).track.kind == "none"
    with pytest.raises(UserError, match=r"track.kind: 'wandb' needs the package wandb"):
        parse(smallest(track={"kind": "wandb"}))
    with pytest.raises(UserError, match=r"'tensorboard' needs the package tensorboard; pip install 'hqsweep\[tensorb"):
        parse(smallest(track={"kind": "tensorboard"}))


def test_all_faults_in_one_line() -> None:
    with pytest.raises(UserError) as raised:
        parse(smallest(train={"steps": "x", "lr": -1, "batchs": 3}, seed=-1))
    text = str(raised.value)
    assert "\n" not in text
    for part in ("train.steps: got 'x'", "train.lr: got -1", "did you mean 'train.batch'?", "seed: got -1"):
        assert part in text


FREE = ("job", "recipe", "model.kind", "model.args", "data.args", "train.optimizer.args")
"""What these hold is told of elsewhere, or may be a mapping."""


def _leaf_paths() -> list[tuple[str, str]]:
    """(path, kind of the model that has it)."""
    sections_of = {path.rpartition(".")[0] for path in leaves(ConvergenceConfig)}
    plain = [p for p in leaves(ConvergenceConfig) if p not in sections_of and not p.startswith((*FREE, "model."))]
    kinds = sections(ConvergenceConfig.model_fields["model"].annotation).items()
    own = [(f"model.{name}", kind) for kind, section in kinds for name in section.model_fields]
    return [(path, "gpt") for path in plain] + [pair for pair in own if pair[0] not in FREE]


@pytest.mark.parametrize(("path", "kind"), _leaf_paths())
def test_every_leaf_refuses_a_wrong_type_and_names_itself(path: str, kind: str) -> None:
    value: object = {"wrong": "type"}
    for key in reversed(path.split(".")):
        value = {key: value}
    if kind != "gpt":
        value["model"]["kind"] = kind
    if path == "data.target":
        value["data"]["source"] = "factory"
    with pytest.raises(UserError, match=rf"(^|; ){path}: got \{{'wrong': 'type'\}}; must be "):
        parse(smallest(**value))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"job": None}, "job: missing; must be one of convergence, parity, calibrate"),
        ({"job": "convergance"}, r"job: got 'convergance' \(did you mean 'convergence'\?\)"),
        ({"recipe": "mxfp8"}, "recipe: got 'mxfp8'; it takes a mapping"),
        ({"recipe": {"linear": "mxfp8"}}, "recipe.name: got None; must be text"),
        ({"recipe": {"name": "../r", "linear": "mxfp8"}}, "recipe.name: got '../r'; must match the pattern"),
        ({"recipe": {"name": "r", "linear": "mxfp8", "hed": "bf16"}}, r"unknown key 'hed' \(did you mean 'head'\?\)"),
        ({"recipe": {"name": "r", "linear": "nvfp4", "overrides": [{"name": "layer.*", "linear": "bf16"}]}},
         r"recipe: overrides\[0\] \('layer.\*'\) matches no module"),
        ({"recipe": {"name": "r", "linear": "nvfp4", "schedule": [{"at": 300, "fprop": "bf16"}]}},
         r"recipe.schedule\[0\].at: 300 is after 300 of 200 updates; a change comes after .* before the last"),
        ({"recipe": {"name": "r", "linear": "nvfp4", "schedule": [{"at": 0.5, "linear": NVFP4_HALF}]}},
         r"layers.0.attn.qkv dgrad: .* \(from step 101 on\)"),
        ({"recipe": {"name": "r", "linear": "mxfp8", "schedule": [{"at": 0.5, "fprop": "bf16"}]},
          "model": {"quantized_weights": True}},
         r"recipe.schedule: from step 101 on layers.0.attn.qkv/linear/weight is bf16\|mxfp8, but model.quantized_w"),
        ({"recipe": {"name": "r", "linear": {"gemms": "nvfp4/nvfp4+rht32+eden/nvfp4+rht32+eden"}},
          "model": {"quantized_weights": True}},
         r"recipe: model.quantized_weights holds layers.0.attn.qkv/linear/weight in .*, and \+eden draws"),
        ({"recipe": {"name": "r", "linear": "bf16", "dpa": "mxfp8"}, "train": {"context": 48}},
         r"recipe: layers.0.attn.dpa qkv columnwise mxfp8: the context has 48 positions; .* \(and in 1 more\)"),
        ({"recipe": {"name": "r", "qfactory": "no such.module"}}, "recipe.qfactory: 'no such.module' is no pa"),
        ({"recipe": {"name": "r", "linear": {"input": "nvfp4+rht", "weight": "nvfp4", "grad_output": "nvfp4"}}},
         "recipe: layers.0.attn.qkv wgrad: .* Hadamard transform must be on both"),
        ({"recipe": {"name": "r", "gemm": "strict", "linear": dict(input="nvfp4", weight="mxfp8", grad_output="bf16")}},
         "fprop: input rowwise nvfp4 cannot meet weight rowwise mxfp8 under gemm=strict"),
        ({"model": {"heads": 3}}, "model.dim: 128 with 3 heads"),
        ({"model": {"dim": 12, "heads": 4}}, "model.dim: 12 with 4 heads; .*even width"),
        ({"data": {"source": "text"}}, "data.path: missing; data.source=text needs"),
        ({"data": {"source": "tokens", "path": "/nope.bin"}}, "data.path: '/nope.bin' does not exist"),
        ({"data": {"path": "x"}}, "data.path: data.source=stdlib reads no path"),
        ({"train": {"microbatches": 3}}, "train.microbatches: 16 sequences do not divide into 3 parts"),
        ({"train": {"compile": "graph", "device": "cpu"}}, "train.compile: graph is a CUDA graph, and .* on the CPU"),
        ({"train": {"compile": "graph", "offload": True}}, "train.compile: graph does not go with train.offload"),
        ({"train": {"warmup": 0.7}}, "train.warmup: 0.7 and train.decay 0.4 .* more than 1"),
        ({"train": {"steps": 0}}, "train.steps: got 0; must be greater than or equal to 1"),
        ({"train": {"lr": float("nan")}}, "train.lr: got nan; must be a finite number"),
        ({"train": {"lr": 1e38}}, "train.lr: got 1e[+]38; must be less than or equal to 10{30}$"),
        ({"train": {"weight_decay": 1e9}}, "train.weight_decay: got 1000000000.0; must be less than"),
        ({"train": {"steps": True}}, "train.steps: got True; must be an integer"),
        ({"train": {"dtype": "bf61"}}, r"train.dtype: got 'bf61'; must be 'bf16' or 'fp32' \(did you mean 'bf16'\?\)"),
        ({"train": 3}, "train: got 3; must be a section with the keys steps, batch"),
        ({"lr": 3}, r"lr: no such key \(did you mean 'train.lr'\?\)"),
        ({"model": {"batch": 3}}, r"model.batch: no such key \(did you mean 'train.batch'\?\)"),
        ({"model": {"qqq": 3}}, "model.qqq: no such key; model takes dim"),
        ({"sweep": "a/b"}, "sweep: got 'a/b'; must match the pattern"),
        ({"engine": {"slurm": {"gres": "gpu:1"}}}, "engine.slurm: given, but the engine is local"),
        ({"engine": {"kind": "slurm", "runs_per_gpu": 2}}, "engine.runs_per_gpu: is for engine=local"),
        ({"engine": {"kind": "slurm", "fail_fast": True}}, "engine.fail_fast: is for engine=local"),
        ({"engine": {"kind": "slurm", "slurm": {"time_min": 1}}}, "engine.slurm.signal_s: 60 s before the end"),
        ({"engine": {"kind": "slurm", "slurm": {"partition": "gpu\ntouch x"}}},
         r"engine.slurm.partition: 'gpu\\ntouch x' has a control character; leave it out"),
        ({"engine": {"kind": "slurm", "slurm": {"gres": "gpu:1\r\n\ntouch x"}}}, "engine.slurm.gres: .* control char"),
        ({"engine": {"kind": "slurm", "slurm": {"options": "--a=b\ntouch x"}}}, "engine.slurm.options: .* control ch"),
        ({"engine": {"kind": "slurm", "slurm": {"options": "'--a b=1'"}}}, "engine.slurm.options: '--a b=1' is no --"),
        ({"engine": {"kind": "slurm", "slurm": {"options": "--a='b"}}}, "engine.slurm.options: .* no words of a shell"),
        ({"engine": {"kind": "slurm", "slurm": {"options": "-A lab"}}}, "engine.slurm.options: '-A' is no --NAME"),
    ],
)  # fmt: skip
def test_wrong_config(extra: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(smallest(**extra))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parity.formats=[mxfp9]", r"parity.formats: format 'mxfp9': unknown name 'mxfp9' \(did you mean 'mxfp8'\?\)"),
        ("parity.shapes=[[1]]", r"parity.shapes.0: got \[1\]; must have at least 2"),
        ("parity.shapes=[[32,33]]", r"parity.shapes: \[32, 33\] does not fit nvfp4[+]ue5m3"),
        ("parity.distributions=[normal,hevy]", r"parity.distributions: got 'hevy' \(did you mean 'heavy'\?\)"),
        ("parity.checks=[kernels]", r"parity.checks: got 'kernels' \(did you mean 'kernel'\?\); known are kernel, "),
        ("parity.checks=[]", r"parity.checks: got \[\]; must have at least 1"),
        ("+recipe=mxfp8", "recipe: no such key; the top level takes sweep"),
    ],
)
def test_wrong_parity_config(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(expand("parity", [override]).points[0].config)


WORDS = ["conf=convergence", "track=none", "recipe=mxfp8", "model.layers=1", "model.dim=32", "model.heads=2"]
WORDS += ["train.steps=1", "train.batch=2", "train.context=32", "train.eval_batches=1"]
WORDS += ["data=markov", "data.markov.length=2000"]


@pytest.fixture
def parsed(monkeypatch):
    """The `linear` sections of the recipes that were made of text since the test began."""
    sections, from_config = [], Recipe.from_config.__func__

    def counted(cls, config, where="recipe"):
        sections.append(config["linear"])
        return from_config(cls, config, where)

    monkeypatch.setattr(Recipe, "from_config", classmethod(counted))
    job._parsed_text.cache_clear()
    return sections


@pytest.mark.parametrize("held", ["false", "true"])
def test_the_text_of_a_recipe_is_parsed_once_for_all_points_of_a_grid(parsed, held):
    words = [*WORDS, f"model.quantized_weights={held}", "seed=0,1,2", "train.lr=1e-3,2e-3"]
    assert len(plan(words).points) == 6
    assert len(parsed) == 1


def test_the_text_of_a_recipe_is_parsed_once_in_a_run(parsed, tmp_path):
    (point,) = plan(WORDS).points
    parsed.clear()
    job._parsed_text.cache_clear()  # a run has a process of its own
    convergence.run(parse(point.config), ListSink(), tmp_path)
    assert len(parsed) == 1


def test_a_recipe_of_a_python_factory_is_made_for_each_config():
    made, text = [], {"name": "r", "qfactory": "my_module.recipe"}

    def find(path, where):
        made.append(path)
        return factory_name(path, where)

    for _ in range(2):
        parse({"job": "convergence", "sweep": "s", "recipe": text}, find)
    assert made == ["my_module.recipe"] * 2


def test_a_plan_of_six_points_walks_few_functions():
    """Calls of our functions: 17,600 where every point parsed and checked its recipe anew."""
    words = [*WORDS, "recipe.linear.input=nvfp4,mxfp8", "seed=0,1,2"]
    job._parsed_text.cache_clear()
    job._check_gpt.cache_clear()
    traced = walk(lambda: plan(words))
    assert traced.calls < 8_800
    assert traced.files <= 46


def test_a_kept_recipe_is_the_one_that_its_dump_gives():
    text = {"name": "r", "linear": "nvfp4|mxfp8", "schedule": [{"at": 0.5, "fprop": "bf16"}]}
    section = parse({"job": "convergence", "sweep": "s", "recipe": text}).recipe
    assert section.build() == parse_recipe(section.model_dump()) == parse_recipe(text)
    assert section.model_copy().build() is section.build()
