"""Trunks that begin from checkpoints of other programs: their runs, their ids, their re-warm, and what is refused."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hqsweep.config.job import parse
from hqsweep.errors import UserError
from hqsweep.sweep.engine.launch import SweepPlan, plan
from hqsweep.sweep.engine.trunks import rewarm_steps
from hqsweep.train.model import GPT

pytestmark = pytest.mark.slow

WORDS = ["conf=convergence", "recipe=bf16,mxfp8", "fork.at=300,600", "fork.steps=6", "fork.decay=4", "track=none",
         "train.steps=600", "model.dim=32", "model.layers=1", "model.heads=2", "train.batch=2", "train.context=32",
         "data=markov", "data.markov.length=20000"]  # fmt: skip


def planned(trunk: object, *words: str) -> SweepPlan:
    keys = {word.partition("=")[0] for word in words}
    defaults = [word for word in WORDS if word.partition("=")[0] not in keys]
    return plan([*defaults, *words, *([f"fork.trunk={trunk}"] if trunk else [])])


def weights(**model: object) -> dict[str, torch.Tensor]:
    """Weights of the model of WORDS, or of a changed one."""
    config = parse(planned(None, *(f"model.{key}={value}" for key, value in model.items())).points[0].config)
    gpt = GPT(config.model, 16, config.recipe.build(), torch.float32)
    return {name: torch.full_like(weight, 0.01) for name, weight in gpt.state_dict().items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("foreign") / "model.safetensors"
    save_file(weights(), path)
    return path


def with_moments(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The file of a training that torch's AdamW did, with its state by indices."""
    shapes = [tensor.shape for tensor in tensors.values()]
    moments = [{"step": torch.tensor(7.0), "exp_avg": torch.zeros(s), "exp_avg_sq": torch.zeros(s)} for s in shapes]
    groups = [{"lr": 1e-3, "params": list(range(len(shapes)))}]
    torch.save({"model": tensors, "optimizer": {"state": dict(enumerate(moments)), "param_groups": groups}}, path)
    return path


def test_every_seed_has_a_trunk_that_begins_from_the_file(file: Path) -> None:
    sweep_plan = planned(file, "seed=0,1", "null_arm=true")
    trunks = [config.fork for config in sweep_plan.configs if config.fork.is_trunk]
    assert len(trunks) == 2 and {(trunk.source, trunk.warmup) for trunk in trunks} == {(str(file.resolve()), 100)}
    forks = [config for config in sweep_plan.configs if not config.fork.is_trunk]
    assert len(forks) == 12 and {config.fork.source for config in forks} == {None}
    assert {config.fork.trunk for config in forks} == {row["run"] for row in sweep_plan.rows() if row["trunk"] is None}
    assert sweep_plan.lines[1] == (
        f"trunks begin from {file.resolve()}, without moments of an optimizer; the rate rises over 100 steps"
    )
    assert planned(None).begun == ""


def test_ids_are_those_of_the_bytes_wherever_they_lie(file: Path, tmp_path: Path) -> None:
    def names(sweep_plan: SweepPlan) -> list[str]:
        return [row["run"] for row in sweep_plan.rows()]

    other, known = tmp_path / "other.safetensors", names(planned(file))
    shutil.copy(file, other)
    assert names(planned(other, "fork.rewarm=100", "fork.warmup=5")) == known
    save_file(weights() | {"norm.weight": torch.ones(32)}, other)
    for sweep_plan in (planned(None), planned(other), planned(file, "fork.rewarm=50")):
        assert not set(names(sweep_plan)) & set(known)


@pytest.mark.parametrize(
    ("words", "steps", "says"),
    [
        ([], 100, "over 100 steps"),
        (["train.beta2=0.99"], 150, "over 150 steps, not 300, since the first fork is at step 300"),
        (["fork.at=30"], 15, "over 15 steps, not 100, since the first fork is at step 30"),
        (["fork.rewarm=300"], 300, "over 300 steps"),
        (["fork.rewarm=1"], 1, "over 1 steps"),
    ],
)
def test_the_rewarm_is_as_long_as_the_second_moment_remembers(
    words: list[str], steps: int, says: str, file: Path
) -> None:
    sweep_plan = planned(file, *words)
    assert {config.fork.warmup for config in sweep_plan.configs} == {steps} and sweep_plan.begun.endswith(says)
    assert [rewarm_steps(beta2) for beta2 in (0.9, 0.95, 0.99, 0.999)] == [100, 100, 300, 3000]


def test_a_checkpoint_with_moments_needs_no_rewarm_and_may_have_one(tmp_path: Path) -> None:
    path = with_moments(tmp_path / "foreign.pt", weights())
    assert {config.fork.warmup for config in planned(path).configs} == {0}
    assert "with the moments of its optimizer" in planned(path).begun
    assert {config.fork.warmup for config in planned(path, "fork.rewarm=20").configs} == {20}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fork.rewarm=0"], "fork.rewarm: 0, but the checkpoint has no moments of an optimizer"),
        (["fork.rewarm=301"], "fork.rewarm: 301 steps, but the first fork is at step 300; give later ones in fork.at"),
        (["fork.rewarm=-1"], "fork.rewarm: got -1; must be greater than or equal to 0"),
        (["model.dim=64"], r"model.safetensors: embedding.weight .*\[16, 32\].*\[16, 64\]"),
        (["data.markov.vocab=8"], r"embedding.weight .*\[16, 32\].*\[8, 32\].*another vocabulary"),
        (["model.layers=2"], "it lacks 6 of the 15 tensors of the model: layers.1.attn"),
        (["model.experts=2"], "of its tensors are none of the model: layers.0.mlp"),
        (["fork.at=[]"], "fork.at: empty; give the steps"),
    ],
)
def test_what_is_refused(words: list[str], says: str, file: Path) -> None:
    with pytest.raises(UserError, match=says):
        planned(file, *words)


def test_what_is_no_checkpoint_is_refused(file: Path, tmp_path: Path) -> None:
    (tmp_path / "half.safetensors").write_bytes(file.read_bytes()[:-7])
    (tmp_path / "empty").mkdir()
    for name, says in (("half.safetensors", r"^fork.trunk: .*half.safetensors"), ("empty", r"^fork.trunk: .*empty")):
        with pytest.raises(UserError, match=says):
            planned(tmp_path / name)
    with pytest.raises(
        UserError, match=r"fork.trunk: '.*gone.pt' has no checkpoint; give .* or one of another program"
    ):
        planned(tmp_path / "gone.pt")
    with pytest.raises(UserError, match=r"fork.trunk: empty; give the path of a checkpoint, or null"):
        plan([*WORDS, "fork.trunk=''"])


def llama(path: Path, **changes: int) -> Path:
    """A folder with a tiny model of Hugging Face."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64} | changes  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(path)
    return path


def test_a_model_of_hugging_face_is_what_its_trunks_begin_from(tmp_path: Path) -> None:
    folder = llama(tmp_path / "model")
    base = [word for word in WORDS if not word.startswith("model.")]
    words = [*base, "model=hf", f"model.path={folder}", "seed=0,1"]
    sweep_plan = plan(words)
    trunks = [config.fork for config in sweep_plan.configs if config.fork.is_trunk]
    assert [(trunk.source, trunk.warmup) for trunk in trunks] == [(str(folder.resolve()), 100)] * 2
    again = plan([*words, f"fork.trunk={folder}"])
    assert [row["run"] for row in again.rows()] == [row["run"] for row in sweep_plan.rows()]
    shutil.copytree(folder, tmp_path / "copy")
    copied = plan([*base, "model=hf", f"model.path={folder}", "seed=0,1", f"fork.trunk={tmp_path / 'copy'}"])
    assert [row["run"] for row in copied.rows()] == [row["run"] for row in sweep_plan.rows()]
    random = plan([*words, "model.pretrained=false"])
    assert random.begun == "" and {config.fork.source for config in random.configs} == {None}
    for changes, says in (
        ({"hidden_size": 64}, r"fork.trunk: .*other1: \S+ is \[.*64.*\] there and \[.*32.*\] in the model"),
        ({"vocab_size": 48}, r"\S+ is \[48, 32\] there .* another vocabulary"),
        ({"num_hidden_layers": 1}, r"it lacks 9 of the 21 tensors of the model: model.layers.1"),
    ):
        other = llama(tmp_path / f"other{len(list(tmp_path.glob('other*'))) + 1}", **changes)
        with pytest.raises(UserError, match=says):
            plan([*words, f"fork.trunk={other}"])


def test_a_rewarm_is_for_trunks_that_begin_from_a_checkpoint() -> None:
    with pytest.raises(UserError, match=r"fork.rewarm: is of trunks that begin from a checkpoint"):
        planned(None, "fork.rewarm=10")
