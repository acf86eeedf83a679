"""A training step of a Hugging Face model by hqsweep's Trainer, as `hqsweep run model=hf` has it, beside torch.compile.

    python -m benchmarks.user_model [--models smollm2 llama_m qwen3 mixtral] [--recipes bf16 mxfp8 ...] [--seconds 300]

Configs have random weights and the published shapes. All cases have FP32 parameters, the same tokens, clipping and
AdamW.

torch compiled  the plain model under torch.compile, in torch.autocast(bfloat16), with fused AdamW: the reference
torch eager     the same without torch.compile (--references)
torchao         the plain model with torchao's float8 linears, compiled, where torchao is installed (--references)
hqsweep         the Trainer's step with train.compile=auto: compiled blocks in a CUDA graph, deterministic kernels only

Steps are timed in turns with the reference, medians. share: the reference's time at its fastest so far, over the case's
(beside_ms: the reference in these turns); memory: the ratio of peaks. A recipe is a name of conf/recipe, with ":native"
for gemm=native. first_step_s: from the model to the end of the first step, with TorchInductor's compilation, of which
the second case of a model finds much in the cache on disk.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import rows, step
from benchmarks.plain_gpt import plain_step
from benchmarks.step import Data, Prepared, alternated
from benchmarks.step_cases import ENDLESS
from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.train import TrainConfig
from hqsweep.models.hf import causal_lm_loss, load_model
from hqsweep.sweep.grid.compose import load_recipe
from hqsweep.train.loop import Trainer

COLUMNS = (
    "model", "case", "recipe", "ran", "ms", "beside_ms", "share", "goal", "pass", "ktokens_s", "memory", "peak_gb",
    "first_step_s", "compiled",
)  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A config of transformers and its batch, with the interface of a Size for Data."""

    keys: dict[str, Any]
    batch: int
    context: int
    turn: int = 6

    @property
    def vocabulary(self) -> int:
        return self.keys["vocab_size"]

    @property
    def tokens(self) -> int:
        return self.batch * self.context


SHAPES = {
    "smollm2": Shape(batch=16, context=1024, keys=LLAMA | {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100000.0, "tie_word_embeddings": True,
    }),
    "llama_m": Shape(batch=32, context=1024, keys=LLAMA | {
        "vocab_size": 50304, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 12, "tie_word_embeddings": False,
    }),
    "qwen3": Shape(batch=8, context=1024, keys={
        "model_type": "qwen3", "hidden_act": "silu", "vocab_size": 151936, "hidden_size": 1024, "head_dim": 128,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    }),
    "mixtral": Shape(batch=16, context=1024, keys={
        "model_type": "mixtral", "hidden_act": "silu", "vocab_size": 32000, "hidden_size": 768, "head_dim": 64,
        "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4,
        "num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False, "tie_word_embeddings": False,
    }),
    "quick": Shape(batch=2, context=32, turn=1, keys=LLAMA | {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False,
    }),
}  # fmt: skip
"""Name -> shape: SmolLM2-135M, a Llama in the shape of benchmarks.step's M, Qwen3-0.6B (their published configs), a
small mixture like Mixtral, and a tiny one for any machine."""
RECIPES = (
    "bf16", "mxfp8", "float8_block_scaling", "nvfp4_fwd_mxfp8_bwd_original", "nvfp4", "current_scaling:native",
    "float8_block_scaling:native",
)  # fmt: skip
_EXACT, _NATIVE = ("mxfp8", "float8_block_scaling"), ("current_scaling:native", "float8_block_scaling:native")
_GOALS = {
    "bf16": (1.00, 1.00, 1.00, 0.95),
    **dict.fromkeys(_EXACT, (0.90, 0.92, 0.95, 0.85)),
    "nvfp4_fwd_mxfp8_bwd_original": (0.85, 0.87, 0.90, 0.75),
    "nvfp4": (0.78, 0.80, 0.85, 0.65),
    **dict.fromkeys(_NATIVE, (1.00, 1.08, 1.15, None)),
}
GOALS = {(model, name): goal for name, goals in _GOALS.items() for model, goal in zip(SHAPES, goals, strict=False)}
"""Model and recipe -> the share that is wanted."""
REFERENCES = ("compiled", "eager", "torchao")


class Ours(step.Ours):
    """A step of our Trainer on a model of Hugging Face with random weights."""

    def __init__(self, folder: Path, shape: Shape, data: Data, recipe: str, device: str) -> None:
        name, _, gemm = recipe.partition(":")
        train = {"steps": ENDLESS, "batch": shape.batch, "context": shape.context, "device": device, "dtype": "bf16"}
        train |= {"log_every": ENDLESS, "eval_every": ENDLESS, "checkpoint_every": ENDLESS}
        config = ConvergenceConfig.model_validate(
            {"job": "convergence", "sweep": "user_model", "train": train, "stats": {"every": 0}}
            | {"recipe": dict(load_recipe(name)) | ({"gemm": gemm} if gemm else {}), "data": {"source": "markov"}}
            | {"model": {"kind": "hf", "path": str(folder / "config.json"), "pretrained": False}}
        )
        self.trainer = Trainer(config, data, config.recipe.build(), torch.device(device))
        self.steps = self.trainer.steps()

    @property
    def compiled(self) -> str:
        return str(self.trainer.adapter.compiled)


class Plain(nn.Module):
    """inputs, targets, int64 [B, T] -> the loss of the plain model, [] (and its auxiliary loss)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss, aux = causal_lm_loss(self.model, inputs, targets)
        return loss if aux is None else loss + aux


def plain(folder: Path, data: Data, how: str, device: str) -> Any:
    """A step of the model in plain torch."""
    model = load_model(folder / "config.json", pretrained=False).to(device)
    if how == "torchao":
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=lambda module, name: name != "lm_head")
    whole = Plain(model)
    whole.cos = next(model.parameters())  # plain_step asks it for the device
    return plain_step(whole, data, TrainConfig(), compiled=how != "eager")


class Bench:
    """The cases of one model. `compiled` is the reference, which stays prepared."""

    def __init__(self, name: str, folder: Path, args: argparse.Namespace, writer: rows.Writer) -> None:
        self.name, self.shape, self.folder, self.args, self.writer = name, SHAPES[name], folder, args, writer
        (folder / "config.json").write_text(json.dumps(self.shape.keys | {"use_cache": False}
                                                       | {"max_position_embeddings": self.shape.context}))  # fmt: skip
        self.data = Data(self.shape, args.device)
        self.compiled: Prepared | None = None
        self.fastest = float("inf")
        """The seconds of a step of `compiled`, the least of all its medians."""

    def run(self, deadline: float) -> None:
        for how in self.args.references:
            build = partial(plain, self.folder, self.data, how, self.args.device)
            self._case({"case": f"torch {how}"}, build, deadline, is_deterministic=False)
        for recipe in self.args.recipes:
            build = partial(Ours, self.folder, self.shape, self.data, recipe, self.args.device)
            self._case({"case": "hqsweep", "recipe": recipe}, build, deadline, is_deterministic=True)

    def _case(self, named: rows.Row, build: Any, deadline: float, *, is_deterministic: bool) -> None:
        """Measure a case; one that fails, or that has not begun by the deadline, is a row."""
        named = {"section": "time", "model": self.name} | named
        if time.perf_counter() > deadline:
            self.writer.add(named | {"error": "not begun in --seconds"})
            return
        self.writer.attempt(named, lambda: self._measured(named, build, is_deterministic))

    def _measured(self, named: rows.Row, build: Any, is_deterministic: bool) -> rows.Row:
        case = Prepared(build, self.args.device, is_deterministic=is_deterministic)
        if named["case"] == "torch compiled":
            self.compiled = case
        both = [case] if self.compiled in (case, None) else [case, self.compiled]
        seconds, *others = alternated(both, self.args.steps or self.shape.turn, self.args.turns)
        if self.compiled is not None:
            self.fastest = min(self.fastest, others[0] if others else seconds)
        row = {"ms": seconds * 1e3, "ktokens_s": self.shape.tokens / seconds * 1e-3} | case.facts
        row |= {fact: value for fact in ("ran", "compiled") if (value := getattr(case.call, fact, None))}
        if others:
            row |= {"beside_ms": others[0] * 1e3, "share": self.fastest / seconds}
            if memory := self.compiled.facts.get("peak_gb"):
                row["memory"] = case.facts["peak_gb"] / memory
        goal = GOALS.get((self.name, named.get("recipe")))
        return row | ({"goal": goal, "pass": row["share"] >= goal} if goal and others else {})


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--models", nargs="+", choices=list(SHAPES), default=[name for name in SHAPES if name != "quick"]
    )
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--references", nargs="*", choices=REFERENCES, default=["compiled"])
    parser.add_argument("--turns", type=int, default=5, help="of each case beside the reference")
    parser.add_argument("--steps", type=int, help="in a turn (default: of the model)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no case begins after so many")
    rows.add_arguments(parser, ("time",))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    deadline = time.perf_counter() + args.seconds
    writer = rows.Writer("user_model", args.device, args)
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            Bench(name, Path(folder), args, writer).run(deadline)
        torch.compiler.reset()
    rows.finish(writer, COLUMNS)


if __name__ == "__main__":
    main()
