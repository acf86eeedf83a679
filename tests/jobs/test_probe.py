"""The probe: what it reads, what it measures, and that its choice is the best under the budget."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hqsweep.config.job import gemm_modules
from hqsweep.config.model import ModelConfig
from hqsweep.errors import UserError
from hqsweep.formats.inputs import draw
from hqsweep.jobs.probe import job
from hqsweep.jobs.probe.job import find_matrices, parse_quantizers, probe
from hqsweep.jobs.probe.suggest import Choice, Suggestion, choose, foreign_modules, recipe_of, suggest
from hqsweep.nn import set_recipe
from hqsweep.quant import HybridQuantizer
from hqsweep.recipe import parse_recipe
from hqsweep.recipe.products import linear_module
from hqsweep.recipe.validate import validate
from hqsweep.report.pages.probe import how_to_use
from hqsweep.train.model import GPT


@pytest.fixture
def file(tmp_path):
    tensors = {
        "layers.10.fc.weight": draw("heavy", 320, 64), "layers.2.fc.weight": draw("normal", 256, 48).float(),
        "experts": draw("normal", 4 * 96, 64).view(4, 96, 64), "odd.weight": torch.ones(33, 47),
        "norm.weight": torch.ones(64), "steps": torch.zeros(32, 32, dtype=torch.int64),
        "nan.weight": torch.full((32, 32), torch.nan), "zeros.weight": torch.zeros(32, 32),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def rows_of(file, *texts):
    quantizers = parse_quantizers(texts)
    return [row for matrix in find_matrices(file)[0] for row in probe(matrix, quantizers)]


def test_matrices_are_found_in_natural_order_and_others_are_told(file):
    matrices, others = find_matrices(file.parent)
    assert [m.name for m in matrices] == [
        "experts", "layers.2.fc.weight", "layers.10.fc.weight", "nan.weight", "odd.weight", "zeros.weight"
    ]  # fmt: skip
    assert dict(others) == {"norm.weight": "1 axes", "steps": "dtype I64"}
    assert (matrices[0].rows, matrices[0].cols) == (4 * 96, 64)


def test_rows_are_the_statistics_of_the_quantizer_however_the_file_is_read(file, monkeypatch):
    whole = rows_of(file, "nvfp4|mxfp8", "fp8_current")
    monkeypatch.setattr(job, "CHUNK_ELEMENTS", 1)
    parts = list(find_matrices(file)[0][2].chunks())
    assert [len(part) for part in parts] == [128, 128, 64]
    for row, again in zip(whole, rows_of(file, "nvfp4|mxfp8", "fp8_current"), strict=True):
        numbers = [name for name, value in row.items() if isinstance(value, float)]
        assert [again[name] for name in numbers] == pytest.approx([row[name] for name in numbers], rel=1e-5)
    expected = HybridQuantizer.parse("nvfp4|mxfp8").statistics(draw("heavy", 320, 64))
    statistics = {
        row["direction"]: row for row in whole if row["tensor"] == "layers.10.fc.weight" and "|" in row["quantizer"]
    }
    assert {d: row["sqnr_db"] for d, row in statistics.items()} == {d: row["sqnr_db"] for d, row in expected.items()}
    assert (statistics["rowwise"]["format"], statistics["columnwise"]["format"]) == ("nvfp4", "mxfp8")
    assert (
        statistics["rowwise"]["bits"] == 4 + 8 / 16 + 32 / (320 * 64) and statistics["columnwise"]["bits"] == 8 + 8 / 32
    )


def test_what_cannot_be_measured_has_a_note_and_no_numbers(file):
    notes = {row["tensor"]: row["note"] for row in rows_of(file, "nvfp4") if row["sqnr_db"] is None}
    assert notes["nan.weight"] == "has NaN or infinite values" and "multiple of 16" in notes["odd.weight"]
    assert notes["zeros.weight"] is None


def test_the_choice_is_the_best_of_all_that_fit():
    """By exhaustion; the greedy choice may miss it by what one step could still have brought."""
    generator = torch.Generator().manual_seed(0)
    sizes, bits = (4, 1, 2, 3, 1), (4.5, 6.25, 8.25)
    options = {
        str(i): [
            Choice(tensor=str(i), quantizer=str(b), elements=n, bits=b, error=float(e))
            for b, e in zip(bits, torch.rand(3, generator=generator).sort(descending=True).values, strict=True)
        ]
        for i, n in enumerate(sizes)
    }

    def total(choices):
        return sum(c.error * c.elements for c in choices)

    for budget in (4.5, 5.0, 6.0, 7.0, 8.25):
        suggestion = Suggestion(choices=tuple(choose(options, budget).values()), left_out=())
        fitting = [
            choices for choices in itertools.product(*options.values())
            if sum(c.bits * c.elements for c in choices) <= budget * sum(sizes)
        ]  # fmt: skip
        best = min(map(total, fitting))
        step = max(n * (o[0].error - o[-1].error) for n, o in zip(sizes, options.values(), strict=True))
        assert suggestion.bits <= budget and best <= total(suggestion.choices) + 1e-12 <= best + step
    assert total(choose(options, 8.25).values()) == pytest.approx(min(map(total, itertools.product(*options.values()))))
    with pytest.raises(UserError, match=r"--bits 4: the cheapest formats take 4.50 bits an element"):
        choose(options, 4)


def test_a_name_of_a_recipe_and_a_format_is_the_format():
    texts = ["nvfp4", "format:nvfp4", "format:nvfp4|mxfp8"]
    assert {text: str(q) for text, q in parse_quantizers(texts).items()} == {t: t for t in ("nvfp4", "nvfp4|mxfp8")}


def test_any_pairs_have_what_was_chosen_in_each_slot(tmp_path):
    """All weights are ones, which every format holds, so that bits help the one input alone."""
    x = draw("normal", 256, 256)
    tensors = {f"layers.{i}.fc.weight": torch.ones(256, 256) for i in range(3)}
    tensors |= {"layers.1.fc.input": x, "embed.weight": x.clone()}
    save_file(tensors, tmp_path / "a.safetensors")
    rows = rows_of(tmp_path / "a.safetensors", "mxfp8", "nvfp4+2d", "nvfp4+rht")
    suggestion = suggest(rows, 6.0, "any")
    recipe = recipe_of(suggestion, "mine")
    assert suggestion.bits <= 6 and {c.quantizer for c in suggestion.choices} == {"mxfp8", "nvfp4+2d"}
    assert len(suggestion.choices) == 4 and recipe["linear"] == "nvfp4+2d"
    assert recipe["overrides"] == [
        {"name": "layers.1.fc", "linear": {"input": "mxfp8", "weight": "nvfp4+2d", "grad_output": "nvfp4+2d"}}
    ]
    assert parse_recipe(recipe).overrides[0].linear.input == HybridQuantizer.parse("mxfp8")
    error = sum(row["rel_l2"] ** 2 for c in suggestion.choices for row in rows
                if (row["tensor"], row["quantizer"]) == (c.tensor, c.quantizer)) / 8  # fmt: skip
    assert suggestion.sqnr_db == pytest.approx(-10 * math.log10(error))


def captured(**tensors):
    """Rows as probe() makes them: {"MODULE.slot": {quantizer: (bits, rel_l2)}}, of equally many elements."""
    return [
        {"tensor": name, "shape": [64, 64], "quantizer": text, "direction": direction, "bits": bits, "rel_l2": error,
         "amax": 1.0, "note": None}
        for name, by_quantizer in tensors.items()
        for text, (bits, error) in by_quantizer.items()
        for direction in ("rowwise", "columnwise")
    ]  # fmt: skip


CHEAP, DEAR = (4.5, 0.1), (8.25, 0.03)
BOTH = {"nvfp4": CHEAP, "mxfp8": DEAR}


def test_strict_pairs_take_all_tensors_of_a_linear_together():
    """The weight gains most by mxfp8, and alone it would get it; its GEMMs want the others in mxfp8, too."""
    slots = {"weight": {"nvfp4": (4.5, 0.9), "mxfp8": DEAR}, "input": BOTH, "grad_output": BOTH}
    rows = captured(**{f"layers.{i}.mlp.fc1.{slot}": by for i in range(2) for slot, by in slots.items()})
    free, strict = (suggest(rows, 6.4, pairs) for pairs in ("any", "strict"))
    assert {c.quantizer for c in free.choices if c.tensor.endswith(".weight")} == {"mxfp8"}
    assert sorted(tuple(linear.values()) for linear in strict.linears.values()) == [("mxfp8",) * 3, ("nvfp4",) * 3]
    assert free.sqnr_db > strict.sqnr_db and strict.bits <= 6.4
    recipe = recipe_of(strict, "mine")
    assert recipe["gemm"] == "strict" and len(recipe["overrides"]) == 1 and "gemm" not in recipe_of(free, "mine")
    with pytest.raises(UserError, match="their scaling modes differ"):
        modules = [linear_module("layers.0.mlp.fc1", 64, 64, 64), linear_module("layers.1.mlp.fc1", 64, 64, 64)]
        validate(parse_recipe(recipe_of(free, "mine") | {"gemm": "strict"}), 1, modules)
    validate(parse_recipe(recipe), 1, modules)


def test_a_weight_with_a_format_for_each_direction_gets_operands_that_meet_it():
    rows = captured(**{"layers.0.mlp.fc1.weight": {"nvfp4|mxfp8": (6.4, 0.1)}})
    recipe = recipe_of(suggest(rows, 8), "mine")
    assert recipe["linear"] == {"input": "nvfp4|mxfp8", "weight": "nvfp4|mxfp8", "grad_output": "mxfp8"}
    validate(parse_recipe(recipe), 1, [linear_module("layers.0.mlp.fc1", 64, 64, 64)])


def test_a_linear_with_a_tensor_that_no_format_fits_stays_in_high_precision():
    rows = captured(**{"layers.0.mlp.fc1.weight": BOTH, "layers.0.mlp.fc1.input": {}, "layers.0.mlp.fc2.weight": BOTH})
    rows += [row | {"tensor": "layers.0.mlp.fc1.input", "rel_l2": None, "note": "odd"} for row in rows[:4]]
    suggestion = suggest(rows, 4.5)
    assert set(suggestion.left_out) == {"layers.0.mlp.fc1.weight", "layers.0.mlp.fc1.input"}
    assert recipe_of(suggestion, "mine")["overrides"] == [{"name": "layers.0.mlp.fc1", "linear": "bf16"}]


def test_formats_without_a_strict_pair_are_refused_with_what_to_do():
    rows = captured(**{"layers.0.mlp.fc1.weight": {"fp8_block+2d": DEAR}})
    with pytest.raises(UserError, match=r"no linear has formats in which hardware multiplies .* give --pairs any"):
        suggest(rows, 9)
    assert recipe_of(suggest(rows, 9, "any"), "mine")["linear"] == "fp8_block+2d"


def test_the_recipe_fits_the_model_whose_tensors_were_measured(tmp_path):
    """The state of our GPT, with experts, as somebody saves it; what no linear reads takes no part in the choice. All
    weights but one are ones, which every format holds."""
    config = ModelConfig(layers=2, dim=64, heads=2, experts=2, top_k=1, shared_expert=True, first_moe_layer=1)
    model = GPT(config, 96, parse_recipe({"name": "bf16", "linear": "bf16"}), torch.float32)
    state = {name: torch.ones(tensor.shape) for name, tensor in model.state_dict().items()}
    state["layers.1.mlp.router.weight"] = torch.ones(32, 64)
    experts = state["layers.1.mlp.fc2.weight"]
    state["layers.1.mlp.fc2.weight"] = draw("normal", experts.numel() // 64, 64).float().view(experts.shape)
    save_file(state, tmp_path / "model.safetensors")
    suggestion = suggest(rows_of(tmp_path / "model.safetensors", "mxfp8", "nvfp4"), 6)
    recipe = recipe_of(suggestion, "mine")
    measured = {choice.tensor for choice in suggestion.choices}
    assert not measured & {"head.weight", "embedding.weight", "layers.1.mlp.router.weight"}
    assert foreign_modules(suggestion) == []
    assert recipe["overrides"] == [{"name": "layers.1.mlp.fc2", "grouped_linear": "mxfp8"}]
    assert set_recipe(model, parse_recipe(recipe)) > 0
    validate(parse_recipe(recipe), 1, gemm_modules(config, 96, 2, 32))


def test_names_of_other_models_are_told():
    rows = captured(**{"model.layers.0.self_attn.q_proj.weight": BOTH, "lm_head.weight": BOTH})
    suggestion = suggest(rows, 9)
    assert foreign_modules(suggestion) == ["model.layers.0.self_attn.q_proj"]
    used = how_to_use(suggestion, Path("mine.yaml"))
    assert "model=hf model.path=FOLDER recipe=mine.yaml, or hqsweep.convert(model, 'mine.yaml')" in used
    assert "hqsweep's own GPT has other names and refuses it" in used
    ours = suggest(captured(**{"layers.7.attn.qkv": BOTH}), 9)
    assert how_to_use(ours, Path("mine.yaml")) == "for the GPT of hqsweep run: recipe=mine.yaml"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("modle.safetensors", "does not exist .did you mean 'model.safetensors'"),
        ("text.safetensors", "cannot be read as a safetensors file"),
        ("empty", "has no .safetensors file"),
        ("flat.safetensors", "has no matrices of floating-point numbers .norm: 1 axes"),
        ("twice", "tensor 'a' is in '.*1.safetensors' and in '.*2.safetensors'"),
    ],
)
def test_wrong_files(file, name, message):
    folder = file.parent
    (folder / "text.safetensors").write_text("no header, but more than eight bytes")
    save_file({"norm": torch.ones(64)}, folder / "flat.safetensors")
    for sub in ("empty", "twice"):
        (folder / sub).mkdir()
    for part in ("1", "2"):
        save_file({"a": torch.ones(32, 32)}, folder / f"twice/{part}.safetensors")
    with pytest.raises(UserError, match=message):
        find_matrices(folder / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nvpf4", "did you mean 'nvfp4'"), ("fp8_delayed", "earlier steps of a training"),
        ("nvfp4|mxfp8@rowwise_dequantized", "leave out the '@' part"), (" ", "nothing given"),
    ],
)  # fmt: skip
def test_wrong_formats(text, message):
    with pytest.raises(UserError, match=message):
        parse_quantizers([text])
