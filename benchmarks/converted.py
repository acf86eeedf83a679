"""A training step of a converted Llama of Hugging Face beside one of hqsweep's own GPT of the same shape and recipe.

    python -m benchmarks.converted [--size M] [--recipes bf16 mxfp8 ...] [--modes eager compiled graphs] [--quick]

Both have FP32 parameters, products in bfloat16 (the Llama's by torch.autocast), as many parameters in products, and the
same tokens, clipping and AdamW. The GPT's step is its Trainer's, train.compile=auto. The Llama's is what a user writes;
its output projection and loss are Hugging Face's, on whole logits in float32, but in the mode "chunks".

gpt        milliseconds of a step, host included, medians of turns
plain      the Llama before it is converted, in each mode
converted  the same model converted: gpt_ms is of the GPT in turn with it, share the GPT's time over its own; compiled
           it is to be 0.87 at least (15 % more time)

A recipe is a name of conf/recipe, with ":native" for gemm=native. blocks: each decoder layer compiled by itself.
chunks: the body compiled, and projection and loss by chunks of tokens, as `hqsweep run` has them (models.head_loss).
graphs: chunks, with torch.compile's mode "reduce-overhead", whose CUDA graphs need little of the host.
--quick: a tiny shape, for a look at any machine.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hqsweep
from benchmarks import rows
from benchmarks.step import Data, Ours, Prepared, alternated
from benchmarks.step_cases import SIZES, build_recipe
from benchmarks.step_floors import Size
from hqsweep.config.model import ModelConfig, ffn_width
from hqsweep.config.train import TrainConfig
from hqsweep.models.head_loss import HeadLoss
from hqsweep.models.hf import causal_lm_loss
from hqsweep.nn import quantization

SECTIONS = ("gpt", "plain", "converted")
MODES = ("eager", "compiled", "blocks", "chunks", "graphs")
JUDGED = ("compiled", "chunks", "graphs")
CHUNK = 128
"""The rows of a chunk on a CPU, which has no kernels and would form none."""
RECIPES = ("bf16", "mxfp8", "nvfp4", "float8_block_scaling", "current_scaling:native")
GOAL = 1 / 1.15
"""The least share of a compiled step: the GPT's time over its own."""
QUICK = Size(model=ModelConfig(dim=64, layers=2, heads=2), batch=2, context=32, vocabulary=96, turn=1)
COLUMNS = (
    "section", "size", "recipe", "mode", "ran", "ms", "gpt_ms", "share", "goal", "pass", "ktokens_s", "tflops",
    "peak_gb", "first_step_s", "converted",
)  # fmt: skip


def llama(size: Size) -> nn.Module:
    """A Llama with random weights, every head with keys of its own, the GPT's width of the MLP, and an untied
    output."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = size.model
    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=model.dim, intermediate_size=ffn_width(model),
        num_hidden_layers=model.layers, num_attention_heads=model.heads, num_key_value_heads=model.heads,
        max_position_embeddings=size.context, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


class LlamaStep:
    """A step of the Llama, converted where there is a recipe: forward, loss, backward, clip, AdamW."""

    def __init__(self, size: Size, data: Data, recipe: str | None, mode: str, device: str) -> None:
        self.model, self.data, self.device, self.step = llama(size).to(device), data, device, 0
        self.converted = "" if recipe is None else str(hqsweep.convert(self.model, build_recipe(recipe)))
        train = TrainConfig()
        self.clip, betas = train.clip, (train.beta1, train.beta2)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=train.lr, betas=betas, eps=1e-8, fused=device == "cuda")
        if mode == "blocks":
            for layer in self.model.model.layers:
                layer.compile()
        self.around = nullcontext
        if mode in ("chunks", "graphs"):
            self.model.model.compile(mode="reduce-overhead" if mode == "graphs" else None)
            self.around = HeadLoss(self.model, CHUNK if device == "cpu" else None)
        self.forward = torch.compile(self.model) if mode == "compiled" else self.model

    def __call__(self) -> Tensor:
        self.step += 1
        torch.compiler.cudagraph_mark_step_begin()
        inputs, targets = (tokens.to(self.device, non_blocking=True) for tokens in self.data())
        with quantization(seed=0, step=self.step):
            with torch.autocast(self.device, torch.bfloat16):
                loss, _ = causal_lm_loss(self.forward, inputs, targets, self.around)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class Bench:
    """The cases of one size."""

    def __init__(self, name: str, size: Size, args: argparse.Namespace) -> None:
        self.name, self.size, self.args = name, size, args
        self.data = Data(size, args.device)

    def cases(self, section: str) -> Iterator[tuple[rows.Row, Any]]:
        """The fields that name a row, and a call that measures the rest of it."""
        recipes = [None] if section == "plain" else self.args.recipes
        modes = ["auto"] if section == "gpt" else self.args.modes
        for recipe in recipes:
            for mode in modes:
                named = {"section": section, "size": self.name, "recipe": recipe or "", "mode": mode}
                yield named, partial(self._measured, section, recipe, mode)

    def _measured(self, section: str, recipe: str | None, mode: str) -> rows.Row:
        device, both = self.args.device, []
        if section != "gpt":
            both.append(self._llama(recipe, mode))
        if section != "plain":  # after graphs of torch.compile, which would spoil the GPT's own (docs/performance.md)
            gpt = Prepared(lambda: Ours(self.size, self.data, recipe, "auto", device), device, is_deterministic=True)
            both.append(gpt)
        own = both[0]
        seconds, *others = alternated(both, self.args.steps or self.size.turn, self.args.turns)
        row = {"ms": seconds * 1e3, "ktokens_s": self.size.tokens / seconds * 1e-3} | own.facts
        row |= {"tflops": self.size.flop() / seconds * 1e-12, "ran": getattr(own.call, "ran", mode)}
        if not others:
            return row
        share = others[0] / seconds
        row |= {"gpt_ms": others[0] * 1e3, "share": share, "converted": own.call.converted}
        return row | ({"goal": GOAL, "pass": share >= GOAL} if mode in JUDGED else {})

    def _llama(self, recipe: str | None, mode: str) -> Prepared:
        torch.compiler.reset()
        step = partial(LlamaStep, self.size, self.data, recipe, mode, self.args.device)
        return Prepared(step, self.args.device, is_deterministic=False)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=[name for name in SIZES if name != "moe"], default="M")
    parser.add_argument("--quick", action="store_true", help="a tiny shape instead of --size")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["eager", "compiled", "chunks", "graphs"])
    parser.add_argument("--turns", type=int, default=5, help="of each case beside the GPT")
    parser.add_argument("--steps", type=int, help="in a turn (default: of the size)")
    rows.add_arguments(parser, SECTIONS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    writer = rows.Writer("converted", args.device, args)
    bench = Bench("quick", QUICK, args) if args.quick else Bench(args.size, SIZES[args.size], args)
    for section in args.only:
        for named, measure in bench.cases(section):
            writer.attempt(named, measure)
    rows.finish(writer, COLUMNS)


if __name__ == "__main__":
    main()
