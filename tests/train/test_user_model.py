"""Users' own models in the training loop: they resume, recompute and accumulate to the bit, and statistics, capture,
schedules and states of delayed scaling are as the GPT's."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import transformers
from cases import LINEARS
from support.checkpoints.titan import write
from support.models.tiny import tiny
from torch import nn

from hqsweep.checkpoints.user_model import check_model_files
from hqsweep.config.job import parse
from hqsweep.errors import UserError
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink
from hqsweep.models.build import code_of
from hqsweep.models.head_loss import HeadLoss, model_loss
from hqsweep.models.linear import ConvertedLinear
from hqsweep.recipe.factories import find_factory
from hqsweep.train import data, user_model
from hqsweep.train.checkpoint import load_checkpoint, save_checkpoint
from hqsweep.train.loop import Trainer
from hqsweep.train.user_model import NotCapturable, draws_numbers, loss_by_chunks

pytestmark = pytest.mark.slow

NVFP4 = LINEARS["nvfp4"]
DELAYED = LINEARS["fp8_delayed"]
HERE = "tests.train.test_user_model"


class Small(nn.Module):
    """A bigram model with a block, an unused linear, and dropout if asked for."""

    def __init__(self, width: int = 32, vocab: int = 16, dropout: float = 0.0, stray: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop, self.out = nn.Dropout(dropout), nn.Linear(width, vocab)
        if stray:
            self.stray = nn.Linear(width, width)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.out(x + self.drop(self.down(torch.relu(self.up(x)))))


class WithLoss(Small):
    def loss(self, tokens, targets):
        x = self(tokens)
        return nn.functional.cross_entropy(x.flatten(0, 1), targets.flatten()), 0.01 * x.square().mean()


class Functional(Small):
    """Drops without a module for it; `always`: in evaluation too."""

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always = always

    def forward(self, tokens):
        return super().forward(tokens) * nn.functional.dropout(torch.ones(()), 0.5, self.training or self.always)


class Wordy(Small):
    def forward(self, tokens):
        return "logits"


class Seeing(Small):
    """Adds to every token the mean of all, which has the ones that come later."""

    def forward(self, tokens):
        return super().forward(tokens) + self.out(self.table(tokens).mean(1, keepdim=True))


def no_model(**options):
    return options


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, kind, options in (
        ("llama", "llama", {}), ("tied", "llama", {"tie_word_embeddings": True}),
        ("gpt2", "gpt2", {"resid_pdrop": 0.1}), ("mixtral", "mixtral", {"output_router_logits": True}),
    ):  # fmt: skip
        tiny(kind, **options).save_pretrained(root / name)
    return root


def config(model, linear="mxfp8", *, schedule=(), stats=None, seed=0, dpa=None, **train):
    recipe = {"name": "r", "linear": linear, "schedule": list(schedule)} | ({"dpa": dpa} if dpa else {})
    section = {"kind": "hf", "path": str(model)} if isinstance(model, Path) else {"_target_": f"{HERE}.Small"} | model
    return parse(
        {
            "job": "convergence", "sweep": "t", "seed": seed, "recipe": recipe, "model": section,
            "stats": stats or {"every": 0}, "data": {"source": "markov", "markov": {"length": 20000}},
            "train": {"steps": 6, "batch": 4, "context": 32, "eval_batches": 2, "eval_every": 3, "log_every": 1,
                      "checkpoint_every": 3, "device": "cpu", "lr": 1e-3, **train},
        },
        find_factory,
    )  # fmt: skip


def trainer(cfg):
    return Trainer(cfg, data.load(cfg.data), cfg.recipe.build(), torch.device("cpu"))


def losses(cfg) -> list[float]:
    return [done.metrics["train_loss"] for done in trainer(cfg).steps()]


def weights(t: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in t.model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_of_a_hugging_face_model_learns(folders, tmp_path):
    sink = ListSink()
    convergence.run(config(folders / "llama", steps=30, lr=1e-2, eval_every=15), sink, tmp_path)
    values = [row["value"] for row in sink.metrics if row["metric"] == "val_loss"]
    assert values[-1] < values[0] and values[-1] < sink.facts["data"]["unigram_entropy_nats"]
    assert "unused" not in sink.facts and not [line for line in sink.facts.get("warnings", []) if "converted" in line]
    assert sink.facts["saved_for_backward"]["input_bytes_per_element"]["model.layers.*.mlp.down_proj"] == 1 + 1 / 32
    assert sink.facts["gemm_plan"]["model.layers.0.self_attn.q_proj"]["fprop"].startswith("mxfp8 x mxfp8")


@pytest.mark.parametrize(
    ("name", "linear"),
    [("tied", NVFP4), ("gpt2", NVFP4), ("llama", DELAYED), ("factory", DELAYED),
     pytest.param("mixtral", DELAYED, marks=pytest.mark.slow)],
    ids=lambda value: value if isinstance(value, str) else "nvfp4" if value is NVFP4 else "delayed",
)  # fmt: skip
def test_a_resumed_run_is_an_uninterrupted_one(name, linear, folders, tmp_path):
    """With the states of delayed scaling, and gpt2 with dropout."""
    cfg = config({"dropout": 0.2} if name == "factory" else folders / name, linear, steps=4, context=16)
    whole, first = trainer(cfg), trainer(cfg)
    rows = [done.metrics for done in whole.steps()]
    for _ in first.steps(last=2):
        pass
    save_checkpoint(first, tmp_path)
    resumed = trainer(cfg)
    assert load_checkpoint(resumed, tmp_path) and resumed.step == 2
    assert [done.metrics for done in resumed.steps()] == rows[2:]
    assert same(weights(whole), weights(resumed))
    assert ("conversion" in whole.state()) == (linear is DELAYED)


def test_dropout_is_a_function_of_the_step_and_off_in_evaluations():
    dropped = config({"dropout": 0.5})
    torch.manual_seed(1)
    one = losses(dropped)
    torch.manual_seed(2)
    assert losses(dropped) == one != losses(config({}))
    t = trainer(dropped)
    assert t.evaluate() == t.evaluate() == trainer(config({})).evaluate()
    assert t.model.training and "dropout" in t.adapter.why_eager and trainer(config({})).adapter.why_eager is None


@pytest.mark.parametrize("microbatches", [1, 2])
def test_functional_dropout_is_a_function_of_the_step_too(microbatches, tmp_path):
    cfg = config({"_target_": f"{HERE}.Functional"}, microbatches=microbatches)
    torch.manual_seed(1)
    whole, first = trainer(cfg), trainer(cfg)
    assert whole.adapter.draws is None
    rows = [done.metrics for done in whole.steps()]
    assert len({row["grad_norm"] for row in rows}) > 1 and whole.adapter.draws and first.adapter.why_eager is None
    torch.manual_seed(2)
    for _ in first.steps(last=3):
        pass
    save_checkpoint(first, tmp_path)
    resumed = trainer(cfg)
    assert load_checkpoint(resumed, tmp_path)
    assert [done.metrics for done in resumed.steps()] == rows[3:] and same(weights(whole), weights(resumed))
    plain = trainer(config({}))
    next(plain.steps())
    assert plain.adapter.draws is False


def test_draws_on_the_host_that_begin_late_are_no_part_of_a_graph(monkeypatch):
    """A graph would repeat the one decision of its capture in every step."""
    late = trainer(config({"_target_": f"{HERE}.Functional"}))
    late.adapter.draws = False
    monkeypatch.setattr(user_model, "is_captured", lambda device: True)
    with pytest.raises(NotCapturable, match="draws random numbers"):
        next(late.steps())


def test_a_model_that_draws_in_evaluation_is_measured_alike_each_time():
    t = trainer(config({"_target_": f"{HERE}.Functional", "always": True}))
    assert t.evaluate() == t.evaluate()


def test_the_loss_by_chunks_is_that_of_whole_logits(folders, capsys):
    for name in ("llama", "mixtral"):
        whole, parts = (trainer(config(folders / name)) for _ in range(2))
        assert loss_by_chunks(parts.model)
        parts.adapter.around = HeadLoss(parts.model, 128)
        (a, b), (c, d) = ([done.metrics["train_loss"] for done in t.steps(last=2)] for t in (whole, parts))
        assert c == pytest.approx(a, rel=1e-4) and d == pytest.approx(b, rel=1e-3) and (a, b) != (c, d)
    assert not loss_by_chunks(Small())
    t = trainer(config(folders / "llama"))
    t.model.lm_head.register_forward_hook(lambda *_: None)
    assert not loss_by_chunks(t.model)
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("model: converted ")]
    assert said == ["loss: by chunks of tokens"] * 2 + ["loss: of whole logits, for its output projection has hooks"]


@pytest.mark.gpu
def test_on_a_gpu_the_loss_is_by_chunks(folders):
    cfg = config(folders / "llama", device="cuda", compile="off")
    graph = config(folders / "llama", device="cuda")
    whole, parts = (Trainer(c, data.load(c.data), c.recipe.build(), torch.device("cuda")) for c in (cfg, graph))
    assert isinstance(parts.adapter.around, HeadLoss)
    for own, ours in zip(whole.steps(), parts.steps(), strict=True):
        assert ours.metrics["train_loss"] == pytest.approx(own.metrics["train_loss"], rel=5e-3)
    assert parts.runner.has_graph


def test_dropout_is_found_in_configs_too():
    assert draws_numbers(tiny("llama", attention_dropout=0.1)) and not draws_numbers(tiny("llama"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layers_that_are_computed_again_give_the_same_bits(dtype, folders):
    options = {"linear": NVFP4, "dtype": dtype, "steps": 3}
    plain, again = (trainer(config(folders / "llama", recompute=how, **options)) for how in ("none", "layer"))
    calls = {plain: 0, again: 0}
    for t in calls:
        t.model.model.layers[0].mlp.down_proj.register_forward_pre_hook(
            lambda *_, t=t: calls.update({t: calls[t] + t.model.training})
        )
    assert [d.metrics for d in plain.steps()] == [d.metrics for d in again.steps()]
    assert same(weights(plain), weights(again)) and calls == {plain: 3, again: 6}


def test_microbatches_add_up(folders):
    whole, parts = (losses(config(folders / "llama", "fp32", dtype="fp32", microbatches=n)) for n in (1, 4))
    assert whole == pytest.approx(parts, rel=1e-5)


def test_the_dtype_of_products_is_that_of_the_config(folders, monkeypatch):
    seen = set()
    forward = ConvertedLinear.forward

    def noted(module, x):
        y = forward(module, x)
        seen.add((module.weight.dtype, y.dtype))
        return y

    monkeypatch.setattr(ConvertedLinear, "forward", noted)
    for dtype in ("bf16", "fp32"):
        next(trainer(config(folders / "llama", dtype=dtype)).steps())
    assert seen == {(torch.float32, torch.bfloat16), (torch.float32, torch.float32)}


def test_samples_are_those_of_all_linears_and_change_nothing(folders):
    sampled = config(folders / "llama", stats={"every": 2, "capture_at": 4})
    t = trainer(sampled)
    steps = list(t.steps())
    names = {row["layer"] for row in steps[1].stats}
    assert names == {part.module.name for part in t.adapter.conversion.parts} and len(names) == 14
    assert {row["tensor"] for row in steps[1].stats} >= {"input", "weight", "grad_output", "fprop", "dgrad", "wgrad"}
    assert set(steps[3].captured) == {f"{n}.{tensor}" for n in names for tensor in ("input", "weight", "grad_output")}
    assert [s.metrics for s in steps] == [s.metrics for s in trainer(config(folders / "llama")).steps()]


def test_a_schedule_changes_the_recipe_of_a_user_s_model(folders):
    t, seen = trainer(config(folders / "llama", schedule=[{"at": 3, "linear": "bf16"}])), []
    for done in t.steps():
        seen.append((done.metrics.get("recipe_stage"), t.adapter.conversion.modules[0].formats["input"]))
    assert seen == [(0.0, "mxfp8"), (None, "mxfp8"), (None, "mxfp8")] + [(1.0, "bf16")] + [(None, "bf16")] * 2


def test_the_auxiliary_loss_is_told_apart(folders):
    t = trainer(config(folders / "mixtral", "fp32", dtype="fp32", lr=1e-9))
    done = next(t.steps())
    batch = t._batch("train", 0)
    t.model.train()
    out = t.model(input_ids=batch[0], labels=batch[1], shift_labels=batch[1], use_cache=False)
    weighted = t.model.router_aux_loss_coef * out.aux_loss
    assert done.metrics["aux_loss"] == pytest.approx(weighted.item(), rel=1e-4)
    assert done.metrics["train_loss"] == pytest.approx(out.loss.item(), rel=1e-5)
    assert model_loss(t.model, *batch)[0].item() == pytest.approx((out.loss - weighted).item(), rel=1e-6)
    assert "expert_load_max" not in done.metrics and "aux_loss" not in next(trainer(config({})).steps()).metrics


def test_a_method_loss_is_what_is_minimized():
    done = next(trainer(config({"_target_": f"{HERE}.WithLoss"})).steps())
    assert done.metrics["aux_loss"] > 0


OWN = """
from torch import nn


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(16, 32), nn.Linear(32, 16)
        self.up = nn.Linear(32, 32)

    def forward(self, tokens):
        return self.out(self.up(self.table(tokens)))


def build():
    return Own()
"""


def test_a_state_of_other_code_is_refused_and_comments_are_none(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def written(text):
        (tmp_path / "own_code.py").write_text(text)
        sys.modules.pop("own_code", None)
        importlib.invalidate_caches()
        return trainer(config({"_target_": "own_code.build"}))

    first = written(OWN)
    next(first.steps())
    assert first.adapter.facts["model_code"].startswith("own_code ") and "," not in first.adapter.facts["model_code"]
    save_checkpoint(first, tmp_path / "run")
    assert load_checkpoint(written("# a comment" + OWN), tmp_path / "run")
    with pytest.raises(
        UserError, match=r"own_code.build is other code than this state was trained with \(own_code diff"
    ):
        load_checkpoint(written(OWN.replace("self.up(", "2 * self.up(")), tmp_path / "run")
    assert code_of(tiny("llama"), tiny).split(", ")[1] == f"transformers {transformers.__version__}"


def test_the_code_of_a_function_s_model_is_a_fact_of_its_run(tmp_path):
    sink = ListSink()
    convergence.run(config({}, steps=1), sink, tmp_path)
    assert sink.facts["model_code"].startswith(f"{HERE} ")


def test_matrices_decay_and_embeddings_and_vectors_do_not(folders):
    for name, apart in (("mixtral", "model.embed_tokens.weight"), ("tied", "model.embed_tokens.weight")):
        t = trainer(config(folders / name))
        named = {id(p): n for n, p in t.model.named_parameters()}
        decayed, others = ([named[id(p)] for p in g["params"]] for g in t.optimizer.param_groups)
        assert apart in others and [n for n in others if "norm" not in n] == [apart]
        assert any("proj" in n for n in decayed) and len(decayed) + len(others) == len(named)


def test_modules_that_are_passed_by_are_named(tmp_path):
    sink = ListSink()
    with pytest.warns(UserWarning, match="stray"):
        convergence.run(config({"stray": True}), sink, tmp_path)
    assert sink.facts["unused"] == ["stray"]
    assert any(line.startswith("stray: converted, but not used") for line in sink.facts["warnings"])


def test_noise_of_the_null_arm_is_small_and_keyed_by_the_seed(folders):
    def start(noise, seed=0):
        section = config(folders / "llama").model.model_copy(update={"init_noise": noise})
        return weights(trainer(config(folders / "llama", seed=seed).model_copy(update={"model": section})))

    plain, noisy = start(0.0), start(0.01)
    off = torch.cat([((noisy[n] - plain[n]) / plain[n])[plain[n] != 0].flatten() for n in plain])
    assert 0.009 < off.std() < 0.011 and same(noisy, start(0.01)) and not same(noisy, start(0.01, seed=1))


@pytest.mark.parametrize(
    ("model", "train", "sentence"),
    [
        ({"_target_": f"{HERE}.no_model"}, {}, r"no_model\(\) gave dict; it must give a torch.nn.Module"),
        ({"widht": 32}, {}, r"Small\(widht=32\) raised TypeError"),
        ({"vocab": 8}, {}, r"model: the data has 16 tokens, but its embedding has 8 rows"),
        ({"_target_": f"{HERE}.Seeing"}, {}, r"model: Seeing sees tokens that come later"),
        ({}, {"recompute": "layer"}, r"train.recompute: layer is Hugging Face's gradient checkpointing, which .*Small"),
        ({}, {"recompute": "attention"}, r"train.recompute: attention alone is computed again by hqsweep's own GPT"),
    ],
)
def test_what_cannot_be_trained_is_refused(model, train, sentence):
    with pytest.raises(UserError, match=sentence):
        trainer(config(model, **train))


def test_a_loss_that_is_none_is_refused():
    with pytest.raises(UserError, match=r"Wordy gave str for .*; it must be of Hugging Face"):
        next(trainer(config({"_target_": f"{HERE}.Wordy"})).steps())


def test_a_model_that_was_changed_since_is_refused(folders, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    section = config(tmp_path).model.model_copy(update={"hash": "0" * 64})
    with pytest.raises(UserError, match=r"is another model than it was when this run was planned"):
        trainer(config(tmp_path).model_copy(update={"model": section}))


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_weights_in_another_kind_of_checkpoint_are_read_too(kind, tmp_path):
    model = tiny("llama")
    model.config.save_pretrained(tmp_path)
    if kind == "torch":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        write(model.state_dict(), tmp_path)
    cfg = config(tmp_path)
    check_model_files(cfg.model_dump(mode="json"))
    assert same(weights(trainer(cfg)), {name: p.detach() for name, p in model.named_parameters()})
