"""Peak memory and time of a training step of a GPT whose activations are kept, computed again, or wait in CPU memory.

    python -m benchmarks.offload [--only step] [--recipe mxfp8] [--dim 2048] [--layers 8] [--batch 8] [--context 2048]

step  forward and backward, without an optimizer: median, peak memory, and what of it the step itself took.

Two floors say what each way can cost at best, for L layers of width D on N tokens.

Bytes over PCIe, for offload: with FP8 codes a layer saves about 33 bytes a token and unit of D (gate and up of SwiGLU
11, queries, keys, values and output of attention 8, two residual streams 8, codes of four inputs 6), so N D L 33 each
way: 8.9 GB at the default size, 0.16 s out and 0.16 s back at 55 GB/s. The rows have the bytes that did leave and the
floor at the speed of a copy in the same run; forward and backward overlap their copies, so a step takes at least the
two.

Extra FLOPs, for recompute: a forward of the linears is 24 N D^2 L, of the causal core of attention, at context T,
2 N T D L: 13.2 and 1.1 TFLOP at the default size. recompute=layer adds both, a third of the step; recompute=attention
the second.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import rows
from benchmarks.linear import RECIPES
from benchmarks.timing import Call, Cuda
from hqsweep.config.job import linear_shapes
from hqsweep.config.model import ModelConfig
from hqsweep.nn.saved_memory import ActivationOffload
from hqsweep.recipe import Recipe
from hqsweep.train.model import GPT

SECTIONS = ("step",)
COLUMNS = (
    "section", "case", "recipe", "ms", "peak_gb", "step_gb", "host_gb", "pcie_floor_ms", "extra_tflop", "tflop",
)  # fmt: skip
CASES = ("none", "recompute=attention", "recompute=layer", "offload", "recompute=layer offload")
VOCABULARY = 256
COPIED_BYTES = 2**28


class Training:
    """A GPT and one batch; a step computes all gradients."""

    def __init__(self, case: str, recipe: object, config: ModelConfig, tokens: Tensor) -> None:
        options = dict(word.split("=") for word in case.split() if "=" in word)
        recipe = Recipe.from_config({"linear": recipe})
        self.model = GPT(config, VOCABULARY, recipe, torch.bfloat16, **options).to(tokens.device)
        self.tokens = tokens
        self.offload = ActivationOffload(self.model) if "offload" in case else None

    def loss(self) -> Tensor:
        if self.offload is None:
            logits = self.model(self.tokens)
        else:
            with self.offload.saving():
                logits = self.model(self.tokens)
        return F.cross_entropy(logits.flatten(0, 1), self.tokens.flatten())

    def step(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.loss().backward()

    def host_bytes(self) -> int:
        """Bytes that wait in CPU memory after forward."""
        loss = self.loss()
        waiting = self.offload.host_bytes if self.offload else 0
        del loss
        return waiting


def forward_tflop(config: ModelConfig, batch: int, context: int) -> dict[str, float]:
    """TFLOP of the forward of all layers: linears, and cores of attention."""
    shapes = [(k, n) for _, k, n in linear_shapes(config, VOCABULARY)[:-1]]
    linears = 2 * batch * context * sum(k * n for k, n in shapes)
    return {"linears": linears * 1e-12, "attention": 2 * batch * context**2 * config.dim * config.layers * 1e-12}


def extra_tflop(case: str, forward: dict[str, float]) -> float:
    """TFLOP that a step computes again."""
    linears = forward["linears"] if "recompute=layer" in case else 0.0
    return linears + (forward["attention"] if "recompute" in case else 0.0)


def pcie_seconds(nbytes: int, clock: Cuda) -> float:
    """Time to bring this many bytes to pinned memory and back, at the speed of a large copy in each direction."""
    device = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    calls: dict[str, Call] = {
        "out": lambda: host.copy_(device, non_blocking=True),
        "back": lambda: device.copy_(host, non_blocking=True),
    }
    return sum(clock.medians(calls).values()) * nbytes / COPIED_BYTES


def measure(case: str, recipe: str, config: ModelConfig, tokens: Tensor, clock: Cuda) -> rows.Row:
    training = Training(case, RECIPES[recipe], config, tokens)
    for _ in range(2):
        training.step()
    training.model.zero_grad(set_to_none=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    training.step()
    torch.cuda.synchronize()
    peak, waiting = torch.cuda.max_memory_allocated(), training.host_bytes()
    forward = forward_tflop(config, *tokens.shape)
    row: rows.Row = {"ms": clock.medians({"step": training.step})["step"] * 1e3}
    row |= {"peak_gb": peak * 1e-9, "step_gb": (peak - before) * 1e-9, "host_gb": waiting * 1e-9}
    row |= {"pcie_floor_ms": pcie_seconds(waiting, clock) * 1e3, "extra_tflop": extra_tflop(case, forward)}
    return row | {"tflop": 3 * sum(forward.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", choices=list(RECIPES), default=["bf16", "mxfp8", "nvfp4 recipe"])
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    rows.add_arguments(parser, SECTIONS)
    args = parser.parse_args()
    torch.manual_seed(0)
    writer, clock = rows.Writer("offload", "cuda", args), Cuda(args.repeats)
    config = ModelConfig(dim=args.dim, layers=args.layers, heads=args.heads)
    tokens = torch.randint(VOCABULARY, (args.batch, args.context), device="cuda")
    shape = {"tokens": tokens.numel(), "context": args.context, "dim": args.dim, "layers": args.layers}
    for recipe in args.recipe:
        for case in CASES:
            named = {"section": "step", "case": case, "recipe": recipe} | shape
            writer.attempt(named, partial(measure, case, recipe, config, tokens, clock))
    rows.finish(writer, COLUMNS)


if __name__ == "__main__":
    main()
