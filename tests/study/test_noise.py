"""The registry of noise: one row for each kind of study, renewed by the next comparison, and never torn."""

import numpy as np
import pytest

from hqsweep.errors import UserError
from hqsweep.report.compare.compare import compare
from hqsweep.study import noise
from hqsweep.study.forecast import forecasts, pace, registry
from hqsweep.sweep.engine import launch
from hqsweep.sweep.engine.launch import plan
from hqsweep.sweep.store.files import read_rows
from hqsweep.train.adapter import DTYPES
from hqsweep.train.model import GPT

ARMS = ("recipe=bf16,mxfp8,nvfp4", "null_arm=true")


@pytest.fixture
def compared(laboratory):
    """compared(words) -> the comparison of a sweep that is done."""

    def run(*words: str):
        return compare(laboratory.start(laboratory.plan(*words), False))

    laboratory.gaps = {"mxfp8": (0.01, 0.01), "nvfp4": (0.1, 0.03), "null": (0.0, 0.001)}
    return run


def test_a_row_says_what_was_measured_on_what(laboratory, compared):
    comparison = compared(*ARMS, "seed=range(4)")
    (row,) = noise.measured(comparison)
    points = comparison.points
    own = {arm: points[points["arm"] == arm]["gap"].to_numpy() for arm in ("mxfp8", "nvfp4", "null")}
    for arm, gaps in own.items():
        assert row["arms"][arm]["sd"] == pytest.approx(gaps.std(ddof=1))
        assert row["arms"][arm]["null"] is (arm == "null")
    assert row["arms"]["nvfp4"]["gap_pct"] == pytest.approx(points[points["arm"] == "nvfp4"]["gap_pct"].mean())
    assert row["sd"] == pytest.approx(np.sqrt((own["mxfp8"].var(ddof=1) + own["nvfp4"].var(ddof=1)) / 2))
    assert row["sd_pct"] == pytest.approx(100 * row["sd"] / comparison.arms["baseline_loss"].iloc[0], rel=1e-9)
    assert (row["design"], row["points"], row["replicates"], row["arms_run"]) == ("whole run", 1, 4, 4)
    assert (row["tokens"], row["run_tokens"], row["trunk_tokens"]) == (6400, 6400, 0)
    assert row["seconds"] == pytest.approx(4 * 100), "four arms, one at a time, 100 seconds each"
    assert (row["device"], row["baseline"]) == ("cpu", "bf16")
    assert row["data_hash"] == laboratory.plan().first.data.hash and "hash" not in row["data"]
    assert row["model"]["dim"] == 32 and row["model"]["init_noise"] == 0 and row["data"]["source"] == "markov"
    assert row["sweeps"] == ["convergence"] and len(row["runs"]) == 64


def test_data_that_is_gone_does_not_matter_to_a_comparison(laboratory, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a study outlives the folder of its data. " * 4000)
    laboratory.gaps = {"mxfp8": (0.01, 0.01)}
    sweep = laboratory.start(laboratory.plan("recipe=bf16,mxfp8", "seed=0,1", "data=text", f"data.path={text}"), False)
    text.unlink()
    (row,) = noise.measured(compare(sweep))
    assert row["data"]["path"] == str(text) and set(row["arms"]) == {"mxfp8"}


def test_a_study_that_is_barely_trained_is_marked_and_replaces_no_other(laboratory, compared):
    """The entropy is that of the data, in nats, and the losses of the laboratory are near 2."""
    runs_dir = laboratory.folder / "runs"

    def row(entropy: float):
        comparison = compared(*ARMS, "seed=range(3)")
        comparison.frames.runs["manifest.data.unigram_entropy_nats"] = entropy
        noise.record(comparison, runs_dir)
        (row,) = read_rows(runs_dir / noise.FILE)
        return row

    toy = row(2.1)
    assert toy["trained"] is False
    good = row(5.0)
    assert good["trained"] is True
    assert row(2.1) == good


def test_a_later_comparison_renews_its_row_and_leaves_the_others(laboratory, compared):
    runs_dir = laboratory.folder / "runs"
    path = noise.record(compared(*ARMS, "seed=0,1"), runs_dir)
    assert path == runs_dir / "noise.jsonl"
    noise.record(compared(*ARMS, "seed=0,1", "train.steps=50", "sweep=short"), runs_dir)
    assert [row["tokens"] for row in read_rows(path)] == [6400, 3200]
    noise.record(compared(*ARMS, "seed=0,1,2"), runs_dir)
    assert [(row["tokens"], row["replicates"]) for row in read_rows(path)] == [(3200, 2), (6400, 3)]


def test_a_row_is_of_the_data_of_most_runs_of_the_baseline_alone(laboratory, compared):
    compared(*ARMS, "seed=0,1,2")
    laboratory_plan = laboratory.plan(*ARMS, "seed=0,1,2")
    runs = launch.folders(laboratory_plan)
    for run in runs:
        if run.manifest()["arm"] == "nvfp4" or run == runs[0]:
            run.update_manifest(data_hash="0" * 64)
            run.write_status(state="finished")
    (row,) = noise.measured(compare(runs))
    assert row["data_hash"] == laboratory_plan.first.data.hash
    assert (set(row["arms"]), row["replicates"]) == ({"mxfp8", "null"}, 2)


def test_one_replicate_measures_no_noise(laboratory, compared):
    assert noise.record(compared(*ARMS, "seed=0"), laboratory.folder / "runs") is None
    assert not (laboratory.folder / "runs/noise.jsonl").exists()


def test_each_baseline_has_a_row(laboratory, compared):
    words = ("recipe=bf16,mxfp8", "seed=0,1", "model.dim=32,64")
    rows = noise.measured(compared(*words))
    assert [row["baseline"] for row in rows] == ["bf16_dim-32", "bf16_dim-64"]
    assert [row["model"]["dim"] for row in rows] == [32, 64]
    assert rows[0]["seconds"] == rows[1]["seconds"] == pytest.approx(400) and rows[0]["arms_run"] == 4


@pytest.mark.parametrize("model", [(), ("model.experts=4", "model.shared_expert=true")])
def test_parameters_are_those_of_the_matrices(laboratory, model):
    config = laboratory.plan(*model).first
    built = GPT(config.model, 16, config.recipe.build(), DTYPES["fp32"], "none")
    counted = sum(linear.weight.numel() for linear in (*built.linears(), *built.grouped_linears()))
    assert noise.parameters(config) == counted


def test_parameters_of_a_users_model_are_all_that_it_has(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    llama = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)
    llama.save_pretrained(tmp_path)
    words = ["conf=convergence", "recipe=bf16,mxfp8", "model=hf", f"model.path={tmp_path}", "model.pretrained=false"]
    sweep_plan = plan([*words, "data=markov", "track=none", "train.context=32"])
    assert noise.parameters(sweep_plan.first) == LlamaForCausalLM(llama).num_parameters()
    assert pace(sweep_plan, registry(tmp_path)).startswith("no comparable study on this kind of device was compared;")
    (row,) = (row for row in registry(tmp_path) if row["sweeps"] == ["ci"])
    size = {"params": noise.parameters(sweep_plan.first), "tokens": 409_600, "data": sweep_plan.first.data.model_dump()}
    assert pace(sweep_plan, [row | size | {"model": noise.model_of(sweep_plan.first)}]).basis.startswith("ci (")
    factory = plan(["conf=convergence", "recipe=bf16,mxfp8", "model._target_=package.build", "track=none"])
    assert noise.parameters(factory.first) is None and isinstance(pace(factory, registry(tmp_path)), str)
    with pytest.raises(UserError, match="a Python function builds the model, which only `hqsweep run` imports"):
        forecasts(factory, 0.1, registry(tmp_path))


def test_a_replicate_of_forks_is_a_trunk(laboratory, compared):
    comparison = compared(*ARMS, "seed=range(3)", "fork.at=40,80", "fork.steps=10", "fork.decay=10", "fork.warmup=5")
    (row,) = noise.measured(comparison)
    points = comparison.points
    means = points[points["arm"] == "nvfp4"].groupby("trunk")["gap"].mean()
    assert row["arms"]["nvfp4"]["sd"] == pytest.approx(means.std()) and len(means) == 3
    assert (row["design"], row["points"], row["replicates"]) == ("fork", 2, 3)
    assert row["tokens"] == (60 + 100) // 2 * 64 and row["run_tokens"] == 2 * 20 * 64 and row["trunk_tokens"] == 80 * 64
    assert row["seconds"] == pytest.approx(80 + 4 * 2 * 20)


@pytest.mark.slow
def test_noise_is_of_the_trunks_that_all_arms_have(laboratory, compared):
    laboratory.late = {"nvfp4-s3"}
    comparison = compared(*ARMS, "seed=range(4)", "fork.at=40,80", "fork.steps=10", "fork.decay=10", "fork.warmup=5")
    (row,) = noise.measured(comparison)
    points = comparison.points[comparison.points["arm"] == "mxfp8"]
    assert comparison.arms.set_index("arm").loc[["mxfp8", "nvfp4"], "n"].tolist() == [4, 3]
    shared = points[points["seed"] < 3].groupby("trunk")["gap"].mean()
    assert row["arms"]["mxfp8"]["sd"] == pytest.approx(shared.std()) and row["replicates"] == 3


def test_a_registry_that_cannot_be_written_ends_no_comparison(compared, tmp_path):
    comparison = compared(*ARMS, "seed=0,1")
    assert noise.record(comparison, tmp_path / "nowhere") is None
    (tmp_path / "noise.jsonl").mkdir()
    assert noise.record(comparison, tmp_path) is None
