"""Composition: where names are found, what a grid holds, arm labels, and equality with Hydra's own composition."""

import math
import shutil
import time
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from hqsweep.config.job import parse
from hqsweep.errors import UserError
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.sweep.grid.compose import PACKAGED, Composer, expand, known_recipes, load_recipe

ORIGINAL = {"rowwise": "nvfp4", "columnwise": "mxfp8", "columnwise_source": "original"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def values(points, *keys):
    return [tuple(OmegaConf.select(OmegaConf.create(p.config), key) for key in keys) for p in points]


SIX = ["bf16", "mxfp8", "nvfp4", "nvfp4_fwd_mxfp8_bwd_original", "nvfp4_fwd_mxfp8_bwd_dequantized",
       "float8_block_scaling"]  # fmt: skip


def test_quickstart_forks_six_recipes_and_the_null_arm_from_four_trunks() -> None:
    grid = expand("quickstart")
    assert list(dict.fromkeys(p.arm for p in grid.points)) == ["trunk", *SIX, "null"]
    assert {p.config["seed"] for p in grid.points} == set(range(4)) and len(grid.points) == 4 * 8
    assert {p.config["sweep"] for p in grid.points} == {"quickstart"} and len(grid.study.fork.at) == 1


@pytest.mark.slow
@pytest.mark.parametrize("conf", ["stdlib", "markov"])
def test_larger_sweeps_have_the_arms_of_quickstart_and_the_null_arm_with_three_seeds(conf: str) -> None:
    points = expand(conf).points
    arms = [*SIX, "null"]
    assert [(p.arm, p.config["seed"]) for p in points] == [(arm, seed) for arm in arms for seed in range(3)]
    assert points[0].config["data"]["source"] == conf


def test_formats_sweep_unquoted() -> None:
    words = ["recipe=bf16", "recipe.linear.input=mxfp8,nvfp4|mxfp8,nvfp4|mxfp8@rowwise_dequantized", "seed=0,1,2"]
    points = expand("convergence", words).points
    formats = ["mxfp8", "nvfp4|mxfp8", "nvfp4|mxfp8@rowwise_dequantized"]
    assert values(points, "recipe.linear.input", "seed") == [(f, seed) for f in formats for seed in range(3)]
    assert [p.arm for p in points[::3]] == [
        "bf16_input-mxfp8",
        "bf16_input-nvfp4-mxfp8",
        "bf16_input-nvfp4-mxfp8-dequantized",
    ]
    assert points[4].changed == ("recipe.linear.input=nvfp4|mxfp8", "seed=1")
    assert points[4].overrides == ("recipe=bf16", *points[4].changed)


def test_an_arm_names_the_fields_that_differ_from_its_recipe(folder: Path) -> None:
    points = expand("convergence", ["recipe=nvfp4,bf16", "recipe.linear.input=bf16,mxfp8", "train.lr=1e-3,2e-3"]).points
    arms = ["nvfp4_input-bf16", "nvfp4_input-mxfp8", "bf16", "bf16_input-mxfp8"]
    assert [p.arm for p in points[::2]] == [f"{arm}_lr-0.001" for arm in arms]
    write(folder / "conf/recipe/open.yaml", "name: open\nlinear: mxfp8\ngemm: ???\n")
    assert [p.arm for p in expand("convergence", ["recipe=open", "recipe.gemm=exact,strict"]).points] == [
        "open_gemm-exact",
        "open_gemm-strict",
    ]


def test_pairs_is_a_grid_over_the_tensors_of_a_linear_with_the_baseline_first() -> None:
    points = expand("pairs").points
    linears = [p.config["recipe"]["linear"] for p in points]
    assert points[0].arm == "bf16" and set(linears[0].values()) == {"bf16"}
    assert len(points) == math.prod(len({linear[tensor] for linear in linears}) for tensor in linears[0])
    assert {p.config["seed"] for p in points} == {0} and {p.config["data"]["source"] for p in points} == {"stdlib"}
    sources = {HybridQuantizer.parse(linear["weight"]).columnwise_source for linear in linears}
    assert sources == {"original", "rowwise_dequantized"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("nvfp4+2d", ["nvfp4+2d"]),
        ("nvfp4+rht+sr,nvfp4+4over6|mxfp8", ["nvfp4+rht+sr", "nvfp4+4over6|mxfp8"]),
        ("'nvfp4|mxfp8'", ["nvfp4|mxfp8"]),
        ("choice(nvfp4+2d,mxfp8)", ["nvfp4+2d", "mxfp8"]),
        ("{rowwise:nvfp4,columnwise:mxfp8,columnwise_source:original}", [ORIGINAL]),
    ],
)
def test_quantizer_values(value: str, expected: list) -> None:
    points = expand("convergence", [f"recipe.linear.weight={value}"]).points
    assert [p.config["recipe"]["linear"]["weight"] for p in points] == expected


def test_fields_of_a_quantizer_sweep_by_themselves() -> None:
    points = expand("convergence", ["recipe=nvfp4", "recipe.linear.input.columnwise=mxfp8,nvfp4+rht"]).points
    assert [p.config["recipe"]["linear"]["input"] for p in points] == [
        {"rowwise": "nvfp4", "columnwise": column, "columnwise_source": "original"} for column in ("mxfp8", "nvfp4+rht")
    ]


def test_products_take_the_place_of_a_section(folder: Path) -> None:
    """Whatever the recipe says there; the run is the one whose sections say the same."""
    words = ["nvfp4+sr*mxfp4/nvfp4+sr/mxfp8", "mxfp8/mxfp8/bf16"]
    points = expand("markov", ["recipe=nvfp4", f"recipe.linear.gemms={','.join(words)}", "seed=0"]).points
    assert [p.arm for p in points][:2] == ["nvfp4_gemms-nvfp4+sr-mxfp4-nvfp4+sr-mxfp8", "nvfp4_gemms-mxfp8-mxfp8-bf16"]
    slots = {"input": "nvfp4+sr|mxfp8", "weight": "mxfp4|nvfp4+sr", "grad_output": "nvfp4+sr|mxfp8"}
    same = expand("markov", ["recipe=nvfp4", *(f"recipe.linear.{t}={q}" for t, q in slots.items()), "seed=0"]).points[0]
    ours, theirs = (parse(point.config).recipe for point in (points[0], same))
    assert ours == theirs and ours.model_dump() == theirs.model_dump()
    file = write(folder / "mine.yaml", "name: mine\nlinear: {gemms: mxfp8/mxfp8/bf16}\n")
    assert load_recipe(f"format:{words[0]}")["head"] == {"gemms": words[0]}
    for key, own in (("linear.weight", "mxfp4"), ("linear.weight.columnwise", "mxfp8|mxfp4"), ("head.gemms", None)):
        value = words[1] if own is None else "mxfp4"
        config = expand("markov", [f"recipe={file}", f"recipe.{key}={value}", "seed=0"]).points[0].config
        recipe = parse(config).recipe
        assert recipe.linear["weight"] == (own or "mxfp8") and recipe.linear["input"] == "mxfp8|bf16"
        assert recipe.head["input"] == ("mxfp8|bf16" if own is None else "bf16")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe.linear.gemms=mxfp8/mxfp8/bf16", "recipe.linear.input=mxfp4"], "gemms says all of recipe.linear, and"),
        (["recipe.linear.input.rowwise=mxfp4", "recipe.linear.gemms=mxfp8/mxfp8/bf16"], "and 'recipe.linear.input.row"),
        (["recipe.linear=mxfp4", "recipe.linear.gemms=mxfp8/mxfp8/bf16"], "and 'recipe.linear=mxfp4' a part of it"),
        (["recipe.linear.gemms=mxfp8/nvfp5/bf16"], r"recipe\.linear\.gemms: dgrad: .*did you mean 'nvfp4'"),
        (["recipe.linear.gemms=mxfp8"], r"recipe\.linear\.gemms: got 'mxfp8'; it takes F/D/W"),
    ],
)
def test_products_beside_tensors_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        expand("markov", ["recipe=nvfp4", *words])


def test_tensors_of_a_one_word_section_sweep_by_themselves(folder: Path) -> None:
    write(folder / "conf/recipe/mine.yaml", "name: mine\nlinear: mxfp8\n")
    (point,) = expand("convergence", ["recipe=mine", "recipe.linear.weight=bf16"]).points
    assert point.config["recipe"]["linear"] == {"input": "mxfp8", "weight": "bf16", "grad_output": "mxfp8"}


def test_ranges_and_globs() -> None:
    points = expand("convergence", ["recipe=glob(mxfp6*)", "seed=range(1,4,2)"]).points
    assert [(p.arm, p.config["seed"]) for p in points] == [
        ("mxfp6_e2m3", 1), ("mxfp6_e2m3", 3), ("mxfp6_e3m2", 1), ("mxfp6_e3m2", 3)
    ]  # fmt: skip


def test_command_line_wins_over_the_sweeps_yaml() -> None:
    points = expand("stdlib", ["seed=7", "recipe=bf16,mxfp8", "null_arm=false"]).points
    assert [(p.arm, p.config["seed"]) for p in points] == [("bf16", 7), ("mxfp8", 7)]


def test_repeated_points_are_left_out() -> None:
    assert len(expand("convergence", ["recipe=bf16,mxfp8,bf16", "seed=0,0"]).points) == 2


@pytest.mark.parametrize("key", ["recipe._target_", "recipe.qfactory"])
def test_a_factory_stands_for_the_whole_recipe(key: str) -> None:
    points = expand("convergence", ["recipe.fp8_dpa=true", f"{key}=my.one,my.other", "recipe=nvfp4"]).points
    assert [p.config["recipe"] for p in points] == [
        {"name": name, "qfactory": f"my.{name}", "fp8_dpa": True} for name in ("one", "other")
    ]
    assert [p.arm for p in points] == ["one", "other"]
    (named,) = expand("convergence", [f"{key}=my.one", "recipe.name=mine"]).points
    assert named.config["recipe"] == {"name": "mine", "qfactory": "my.one"}


def test_two_factories_of_one_name_need_names_of_their_own() -> None:
    with pytest.raises(UserError, match=r"different runs with the same recipe.name 'one'"):
        expand("convergence", ["recipe._target_=my.one,your.one"])


def test_recipes_are_loaded_by_name_and_by_path(folder: Path) -> None:
    write(folder / "conf/recipe/mine.yaml", "defaults: [mxfp8, _self_]\nname: mine\nhead: mxfp8\n")
    write(folder / "plain.yaml", "name: plain\nlinear: mxfp4\n")
    write(folder / "sweep.yaml", "defaults: [convergence, _self_]\nrecipe: {head: mxfp4}\n")
    assert load_recipe("nvfp4")["linear"]["weight"] == "nvfp4+2d"
    assert load_recipe("mine") == load_recipe("conf/recipe/mine.yaml") and load_recipe("mine")["head"] == "mxfp8"
    assert load_recipe("plain.yaml") == {"name": "plain", "linear": "mxfp4"}
    assert load_recipe("sweep.yaml")["head"] == "mxfp4"
    assert "mine" in known_recipes() and "nvfp4" in known_recipes()
    with pytest.raises(UserError, match=r"recipe 'mnie': no such recipe .did you mean 'mine'"):
        load_recipe("mnie")


def test_a_recipe_of_a_file_is_swept_as_packaged_ones_are(folder: Path) -> None:
    (folder / "plain.yaml").write_text("linear: mxfp4\n")
    points = expand("convergence", ["recipe=plain.yaml,mxfp8", "recipe.linear.input=nvfp4"]).points
    assert [point.arm for point in points] == ["plain", "mxfp8"]
    (folder / "plain.yaml").write_text("recipe: [mxfp4]\n")
    with pytest.raises(UserError, match=r"recipe 'plain.yaml': its YAML gives no mapping as recipe"):
        expand("convergence", ["recipe=plain.yaml"])
    assert [point.config["recipe"]["linear"] for point in points] == [
        {"input": "nvfp4", "weight": weight, "grad_output": weight} for weight in ("mxfp4", "mxfp8")
    ]


def test_arm_names_what_was_swept_beside_recipe_and_seed() -> None:
    points = expand("convergence", ["recipe=bf16,mxfp8", "train.lr=1e-3,3e-4", "seed=0,1", "train.steps=10"]).points
    assert sorted({p.arm for p in points}) == [
        "bf16_lr-0.0003", "bf16_lr-0.001", "mxfp8_lr-0.0003", "mxfp8_lr-0.001"
    ]  # fmt: skip


@pytest.mark.parametrize("conf", ["mine", "conf/mine.yaml", "--config-dir", "elsewhere/mine.yaml"])
def test_users_configs_are_found_and_may_use_packaged_groups(folder: Path, conf: str) -> None:
    place = {"--config-dir": "my", "elsewhere/mine.yaml": "elsewhere"}.get(conf, "conf")
    text = "defaults: [convergence, _self_, {override recipe: mxfp8}]\ntrain: {steps: 7}\n"
    write(folder / place / "mine.yaml", text)
    (point,) = expand("mine" if conf == "--config-dir" else conf, [], folder / "my").points
    assert (point.arm, point.config["train"]["steps"], point.config["sweep"]) == ("mxfp8", 7, "mine")


def test_own_folders_come_before_packaged_configs(folder: Path) -> None:
    write(folder / "conf/quickstart.yaml", "job: convergence\nseed: 5\n")
    assert expand("quickstart").points[0].config == {"job": "convergence", "seed": 5, "sweep": "quickstart"}


def test_packaged_configs_are_read_again_after_a_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout ./conf is the packaged folder."""
    shutil.copytree(PACKAGED, folder / "conf")
    monkeypatch.setattr("hqsweep.sweep.grid.compose.PACKAGED", folder / "conf")
    for steps in (7, 11):
        write(folder / "conf/mine.yaml", f"defaults: [convergence, _self_]\ntrain: {{steps: {steps}}}\n")
        composed = [expand("mine").points[0].config for _ in range(2)]
        assert [config["train"]["steps"] for config in composed] == [steps] * 2
        composed[0]["train"]["steps"] = 0  # a config is the caller's own
        assert expand("mine", ["seed=3"]).points[0].config["train"]["steps"] == steps


def test_sweep_name_can_be_given() -> None:
    assert expand("convergence", ["sweep=first"]).points[0].config["sweep"] == "first"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["recipe=nvfp4", "train.lr=0.01", "seed=3"],
        ["data=markov", "model.ffn=96", "data.markov={vocab: 8, order: 1}", "recipe.linear.input=nvfp4|mxfp8"],
        ["recipe=mxfp8", "+recipe.overrides=[{name: layers.0.*, linear: bf16}]", "train.lr=${train.min_lr_fraction}"],
    ],
)
def test_composing_groups_once_equals_composing_all_with_hydra(overrides: list[str]) -> None:
    composer = Composer("quickstart", [])
    composer.compose(["recipe=bf16"])  # so that later choices could see the leavings of earlier ones
    ours = composer.compose(overrides)
    with initialize_config_dir(str(PACKAGED), version_base="1.3"):
        assert ours == OmegaConf.to_container(compose("quickstart", overrides), resolve=True)


def test_points_share_nothing() -> None:
    first, second = expand("convergence", ["seed=0,1"]).points
    first.config["train"]["steps"] = -1
    assert second.config["train"]["steps"] == 200


@pytest.mark.parametrize(
    ("files", "conf", "words", "message"),
    [
        ({}, "quickstrat", [], r"conf=quickstrat: no such config \(did you mean 'quickstart'\?\); known are"),
        ({"quick.yaml": ""}, "./quik.yaml", [], r"conf=./quik.yaml: no such file \(did you mean 'quick.yaml'\?\)"),
        ({"a.yml": ""}, "a.yml", [], "conf=a.yml: a path must end in .yaml"),
        ({"conf/a.yaml": "x: [1\ny: 2\n"}, "a", [], r"conf=a: .*conf/a.yaml: line 2: .*correct the YAML"),
        ({"conf/a.yaml": "x: 1\nx: 2\n"}, "a", [], r"conf=a: .*conf/a.yaml: line 2: key 'x' is given twice"),
        ({"conf/a.yaml": "defaults: [{recipe: mxfp}]"}, "a", [], r"no config 'recipe/mxfp' \(did you mean 'mxfp8'\?\)"),
        ({"conf/a.yaml": "defaults: [convergance]"}, "a", [], "conf=a: .*convergance"),
        ({"conf/a.yaml": "- 1"}, "a", [], "conf=a: primary config 'a' must be a DictConfig"),
        ({"conf/a.yaml": "x: 1"}, "a", ["recipe=mxfp8"], "conf=a: its defaults list has no recipe to replace"),
        ({"conf/a.yaml": "x: ${nope}"}, "a", [], "x: Interpolation key 'nope' not found"),
        ({"conf/a.yaml": "x:\n  y: ???"}, "a", [], r"x.y: no value yet \(\?\?\?\); give x.y=VALUE"),
        ({"conf/recipe/a.yaml": "name: bf16\nlinear: mxfp8"}, "convergence", ["recipe=bf16,a"],
         "recipe=bf16 and recipe=a are different runs with the same recipe.name 'bf16'"),
        ({}, "convergence", ["recipe=mxfp"], r"override 'recipe=mxfp': no recipe 'mxfp' \(did you mean 'mxfp8'\?\)"),
        ({}, "convergence", ["recipe=glob(zz*)"], r"override 'recipe=glob\(zz\*\)': no recipe matches; known are "),
        ({}, "convergence", ["model=glob(zz*)"], r"override 'model=glob\(zz\*\)': no model matches; known are "),
        ({}, "convergence", ["+recipe=mxfp8"], r"recipe is chosen .* already; write recipe=NAME without a \+"),
        ({}, "convergence", ["train.lr=${train.nope}"], "train.lr: Interpolation key 'train.nope' not found"),
        ({}, "convergence", ["train.lr=${oc.env:HOME}"], r"override of train.lr: .* is no reference to a key"),
        ({}, "convergence", ["train.lr=interval(0,1)"], r"an interval cannot be expanded; write range\("),
        ({}, "convergence", ["engine.workers=1,2"], "engine.workers cannot be swept"),
        ({}, "convergence", ["seed=1", "seed=2"], "override 'seed=2': seed is given twice"),
        ({}, "convergence", ["~train.lr"], "override '~train.lr': keys are not deleted"),
        ({}, "convergence", ["hydra.run.dir=x"], "override 'hydra.run.dir=x': .*nor Hydra's own set"),
        ({}, "convergence", ["train.lr"], "override 'train.lr': not of the form KEY=VALUE"),
        ({}, "convergence", ["=3"], "override '=3': not of the form KEY=VALUE"),
        ({}, "convergence", ["a=b=c"], "override 'a=b=c': the value cannot be read"),
        ({}, "convergence", ["recipe@x=mxfp8"], "override 'recipe@x=mxfp8': '@' would move"),
        ({}, "convergence", ["data.markov=[1]"], r"override 'data.markov=\[1\]': Cannot merge"),
    ],
)  # fmt: skip
def test_wrong_input(folder: Path, files: dict[str, str], conf: str, words: list[str], message: str) -> None:
    for name, text in files.items():
        write(folder / name, text)
    with pytest.raises(UserError, match=message) as raised:
        expand(conf, words)
    assert "\n" not in str(raised.value)


RECIPES = {
    "short": "name: short\nlinear: nvfp4|mxfp8\n",
    "parts": "name: parts\nlinear: nvfp4|mxfp8\ngrouped_linear: {weight: mxfp8}\ndpa: {s: fp8_current}\n",
    "long": (
        "name: long\nlinear: nvfp4|mxfp8\n"
        "grouped_linear: {input: nvfp4|mxfp8, weight: mxfp8, grad_output: nvfp4|mxfp8}\n"
        "dpa: {qkv: bf16, s: fp8_current, do: bf16, dp: bf16}\nhead: bf16\nembedding: fp32\n"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("word", "part", "expected"),
    [
        ("dpa.qkv.columnwise=mxfp8", "dpa.qkv", "bf16|mxfp8"),
        ("dpa.qkv=mxfp8", "dpa.qkv", "mxfp8"),
        ("head.weight.rowwise=mxfp8", "head.weight", "mxfp8|bf16"),
        ("embedding.columnwise=bf16", "embedding", "fp32|bf16"),
        ("grouped_linear.input.columnwise_source=rowwise_dequantized", "grouped_linear.input",
         "nvfp4|mxfp8@rowwise_dequantized"),
        ("grouped_linear.grad_output.columnwise=bf16", "grouped_linear.grad_output", "nvfp4|bf16"),
    ],
)  # fmt: skip
def test_one_field_is_overridden_and_the_rest_is_what_the_section_resolves_to(recipe, word, part, expected, tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / f"{recipe}.yaml").write_text(RECIPES[recipe])

    def sections(*words):
        (point,) = expand("convergence", ["track=none", f"recipe={recipe}", *words], tmp_path).points
        config = parse(point.config).recipe.model_dump()
        texts = {f"{p}.{tensor}": q for p, section in config.items() if isinstance(section, dict)
                 for tensor, q in section.items()}  # fmt: skip
        return texts | {"embedding": config["embedding"]}

    assert sections(f"recipe.{word}") == sections() | {part: expected}


def test_fields_of_grouped_linear_start_from_linear_whatever_the_order_of_the_words():
    words = ["recipe.grouped_linear.weight.columnwise=bf16", "recipe.linear=nvfp4"]
    for order in (words, words[::-1]):
        (point,) = expand("convergence", ["track=none", "recipe=mxfp8", *order]).points
        grouped = parse(point.config).recipe.grouped_linear
        assert grouped == {"input": "nvfp4", "weight": "nvfp4|bf16", "grad_output": "nvfp4"}


def test_a_wrong_field_of_a_section_that_is_not_spelled_out_is_named():
    for word, message in [
        ("recipe.dpa.qkv.colwise=mxfp8", r"recipe\.dpa\.qkv: .*unknown key 'colwise' \(did you mean 'columnwise'"),
        ("recipe.dpa.qk=mxfp8", r"recipe\.dpa: unknown key 'qk' \(did you mean 'qkv'"),
    ]:
        with pytest.raises(UserError, match=message):
            parse(expand("convergence", ["track=none", "recipe=mxfp8", word]).points[0].config)


MANY = [
    (["seed=range(0,1000000)"], "override 'seed=range(0,1000000)'", "1,000,000"),
    (["seed=range(0,1e12)"], "override 'seed=range(0,1e12)'", "1,000,000,000,000"),
    (["seed=shuffle(range(0,1e12))"], "override 'seed=shuffle(range(0,1e12))'", "1,000,000,000,000"),
    (["train.lr=range(0,1,1e-9)"], "override 'train.lr=range(0,1,1e-9)'", "1,000,000,000"),
    (["recipe=bf16,mxfp8", "seed=range(0,10001)"], "conf=convergence", "20,002"),
    (["fork.at=range(1,1000000)"], "override 'fork.at=range(1,1000000)'", "999,999"),
    (["fork.at=range(1,1001)", "train.steps=2000", "seed=range(0,21)"], "fork.at", "21,000"),
]


@pytest.mark.parametrize(("words", "where", "count"), MANY, ids=[words[0] for words, _, _ in MANY])
def test_a_grid_that_is_too_large_is_refused_before_it_is_composed(words: list[str], where: str, count: str) -> None:
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        expand("convergence", words)
    assert str(caught.value) == (
        f"{where}: {count} runs at least, and a sweep has at most 20,000; give fewer values, or split them into sweeps"
        " with names of their own (sweep=NAME)"
    )
    assert time.monotonic() - began < 20  # where Hydra's start takes most of it


def test_arms_and_the_sweep_of_a_file_count_for_the_size_of_a_grid(folder: Path) -> None:
    text = "defaults: [convergence]\narms: {a: {recipe: bf16}, b: {recipe: mxfp8, train.lr: 1e-3}}\n"
    params = "hydra: {sweeper: {params: {seed: 'range(0,10001)'}}}\n"
    path = write(folder / "large.yaml", text + params)
    with pytest.raises(UserError, match=r"conf=large: 20,002 runs at least"):
        expand(str(path))


PLANTED = "from pathlib import Path\nPath('planted').touch()\n"
REFERENCES = "a0: lol\n" + "".join(f"a{i}: {f'${{a{i - 1}}}' * 10!r}\n" for i in range(1, 12))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module, a config outside of conf/, and a secret in the environment."""
    monkeypatch.setenv("MY_TOKEN", "planted-secret")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/__init__.py").write_text(PLANTED)
    (tmp_path / "outside.yaml").write_text("linear: planted-secret\n")
    (tmp_path / "conf/recipe").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x: ${oc.env:MY_TOKEN}", "conf/a.yaml: line 1: '.*MY_TOKEN}' is no reference to a key"),
        ("defaults: ['recipe: x', {recipe: '${oc.env:MY_TOKEN}'}]", "line 1: '.*MY_TOKEN}' is no reference"),
        ("hydra: {sweeper: {params: {seed: '${oc.env:MY_TOKEN}'}}}", "line 1: '.*MY_TOKEN}' is no reference"),
        ("hydra: {searchpath: ['pkg://my_package']}", "hydra.searchpath is not followed; give .* by --config-dir"),
        ("defaults: [../outside]", "its file is outside of"),
        ("defaults: [convergence, {override recipe: ../../outside}]", "its file is outside of"),
        ("x: &a [1, 1, 1, 1, 1, 1, 1, 1]\n" + "y: [" + "*a, " * 5000 + "]", "conf/a.yaml: line 2: it has more than"),
        (REFERENCES, "conf=a: the config: it has more than 20000 nodes with its references replaced"),
        (REFERENCES + "hydra: {sweeper: {params: {seed: '${a11}'}}}", "conf=a: the config: it has more than"),
        ("seed: 1\nseed: 2", "line 2: key 'seed' is given twice"),
    ],
)
def test_it_is_refused_before_hydra_follows_it(text: str, message: str, project: Path):
    began = time.monotonic()
    Path("conf/a.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as raised:
        expand("a")
    assert time.monotonic() - began < 5 and not Path("planted").exists()
    assert "planted-secret" not in str(raised.value)


def test_a_recipe_file_is_checked_like_a_config(project: Path):
    Path("mine.yaml").write_text("name: mine\nlinear: ${oc.env:MY_TOKEN}\n")
    Path("conf/recipe/mine.yaml").write_text("name: mine\nlinear: ${oc.env:MY_TOKEN}\n")
    for name in ("mine.yaml", "mine", "conf/recipe/mine.yaml"):
        with pytest.raises(UserError, match=r"mine.yaml: line 2: '.*MY_TOKEN}' is no reference") as raised:
            load_recipe(name)
        assert "planted-secret" not in str(raised.value)


@pytest.mark.parametrize(
    "word",
    ["train.lr=${oc.env:MY_TOKEN}", "+x={a: ['${oc.env:MY_TOKEN}']}", "recipe=${oc.env:MY_TOKEN}",
     "recipe.name='${oc.decode:1}'", "+x.${oc.env:MY_TOKEN}=1"],
)  # fmt: skip
def test_an_override_reads_no_environment(word: str, project: Path):
    with pytest.raises(UserError, match=r"is no reference to a key|not of the form KEY=VALUE") as raised:
        expand("convergence", [word])
    assert "planted-secret" not in str(raised.value)


def test_references_to_keys_are_followed(project: Path):
    Path("conf/a.yaml").write_text(
        "defaults: [convergence, _self_]\nbase: 12\nseed: ${base}\ntrain: {steps: '${.batch}', batch: 7}\n"
    )
    config = expand("a", ["train.context=${train.steps}"]).points[0].config
    assert (config["seed"], config["train"]["steps"], config["train"]["context"]) == (12, 7, 7)
