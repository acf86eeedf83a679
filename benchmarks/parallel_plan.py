"""A training over 8 to 1,024 GPUs on paper: bytes a step, memory of a GPU, and the share of time in communication.

    python -m benchmarks.parallel_plan [--recipes bf16 mxfp8 nvfp4] [--models 8B 70B] [--gpus 8 64 256 1024]

Every GPU takes `tokens` tokens a step (weak scaling), and weights are sharded over the GPUs of a row's `shard`: all of
them (FSDP), or the eight of a node with the gradients of nodes all-reduced (HSDP). P are parameters in products, P_all
those with both embeddings, b bytes an element of the operand that a pass reads (2 where it is high precision), W the
GPUs of the shard and R = GPUs / W the replicas. A GPU sends as much as it receives, in bytes:

    gather      2 (W - 1) / W (P b + 2 (P_all - P))    forward rowwise, backward columnwise; embeddings in bfloat16
    gradients   (W - 1) / W 2 P_all + 2 (R - 1) / R 2 P_all / W    reduce-scatter, then all-reduce, in bfloat16
memory of a GPU:
    state       P_all / W (4 + 4 + 4) + P / W (b_row + b_column) + P_all / W 4    master, moments, operands, gradient
    layers      2 P / layers (b_row + b_column + 2)   two layers gathered, and their gradients in bfloat16
    saved       tokens layers s, with s = b_x (3 D + F) + 2 (3 D + 2 D_kv + 2 F) + 8 D: inputs of linears as codes; q,
                k, v, attention's output, gate and up in bfloat16, the residual stream twice in float32
`memory GB` has all of it, `recomputed GB` the residual stream of every layer (4 D) and s of one layer, as with
activation checkpointing, which takes a third more compute.
time:
    compute     tokens (6 P + 6 D vocabulary + 6 layers D context) / rate, causal attention counted at half, at the
                measured rate of a whole step on one H200
    wire        of a shard in one node over NVLink; of a longer one at the rate of all adapters of a node together, as
                each byte enters a node once, or that of NVLink, whichever is less; between replicas, where every GPU
                has a shard of its own to reduce, over its own adapter

`wire %` is wire / (wire + compute), as if nothing overlapped; `exposed %` is what is left where all of a pass but half
a layer's hides behind the products of that pass. Rates of links are what vendors state (NVLink 4: 450 GB/s a direction;
400 Gbit/s a GPU between nodes: 50 GB/s) times `efficiency`: no measurement. That of a step is one (RATES).
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.rows import Row, markdown

NODE = 8
"""The number of GPUs that NVLink joins."""
LINKS = {"node": 450e9, "network": 50e9}
"""The bytes a second and direction that vendors state."""
RATES = {"bf16": 501e12, "mxfp8": 495e12, "nvfp4": 460e12}
"""The FLOP/s of a whole training step at size L on one H200 (reports/benchmarks/step.md)."""
WIDTHS = {"bf16": (2.0, 2.0), "mxfp8": (1 + 1 / 32, 1 + 1 / 32), "nvfp4": (0.5 + 1 / 16, 0.5 + 1 / 16)}
"""The bytes an element of the rowwise and of the columnwise operand, scales included."""
COLUMNS = (
    "model", "recipe", "GPUs", "shard", "gather GB", "gradients GB", "memory GB", "recomputed GB", "compute s",
    "wire s", "wire %", "exposed %",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Model:
    """A dense Llama 3 (arXiv 2407.21783, table 3)."""

    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int = 128_256
    context: int = 8192

    @property
    def kv_dim(self) -> int:
        return self.dim // self.heads * self.kv_heads

    @property
    def in_products(self) -> int:
        """The parameters of the linears of all layers."""
        return self.layers * (2 * self.dim * self.dim + 2 * self.dim * self.kv_dim + 3 * self.dim * self.ffn)

    @property
    def parameters(self) -> int:
        """All parameters, with the embedding and the output projection."""
        return self.in_products + 2 * self.vocabulary * self.dim


MODELS = {
    "8B": Model(layers=32, dim=4096, ffn=14_336, heads=32, kv_heads=8),
    "70B": Model(layers=80, dim=8192, ffn=28_672, heads=64, kv_heads=8),
}


def row(name: str, recipe: str, gpus: int, shard: int, tokens: int, efficiency: float) -> Row:
    """One row of the table; the module's docstring has the formulas."""
    model, (across, along) = MODELS[name], WIDTHS[recipe]
    products, every, replicas = model.in_products, model.parameters, gpus // shard
    gather = (shard - 1) / shard * (products * (across + along) + 2 * 2 * (every - products))
    scatter = (shard - 1) / shard * 2 * every
    reduce = 2 * (replicas - 1) / replicas * 2 * every / shard
    held = across + along if recipe != "bf16" else 2.0
    state = every / shard * 16 + products / shard * held
    layers = 2 * products / model.layers * (held + 2)
    wide = 2 * (3 * model.dim + 2 * model.kv_dim + 2 * model.ffn) + 8 * model.dim
    saved = tokens * (along * (3 * model.dim + model.ffn) + wide)
    attention = 6 * model.layers * model.dim * model.context
    compute = tokens * (6 * products + attention + 6 * model.vocabulary * model.dim) / RATES[recipe]
    inside, between = (efficiency * LINKS[link] for link in ("node", "network"))
    own = inside if shard <= NODE else min(inside, NODE * between)
    wire = (gather + scatter) / own + reduce / between
    # Forward has a third of the products and half of the gather; backward has the rest.
    forward = max(0.0, gather / 2 / own - compute / 3)
    backward = max(0.0, (gather / 2 + scatter) / own + reduce / between - compute * 2 / 3)
    exposed = forward + backward + wire / model.layers / 2
    return {
        "model": name, "recipe": recipe, "GPUs": gpus, "shard": shard, "gather GB": gather * 1e-9,
        "gradients GB": (scatter + reduce) * 1e-9, "memory GB": (state + layers + saved * model.layers) * 1e-9,
        "recomputed GB": (state + layers + saved + 4 * tokens * model.layers * model.dim) * 1e-9,
        "compute s": compute, "wire s": wire, "wire %": 100 * wire / (wire + compute),
        "exposed %": 100 * exposed / (exposed + compute),
    }  # fmt: skip


def table(args: argparse.Namespace) -> Iterator[Row]:
    """Rows of every model, recipe, number of GPUs, and way to shard them."""
    for name in args.models:
        for gpus in args.gpus:
            for shard in sorted({min(NODE, gpus), gpus}):
                for recipe in args.recipes:
                    yield row(name, recipe, gpus, shard, args.tokens, args.efficiency)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--gpus", nargs="+", type=int, default=[8, 64, 256, 1024])
    parser.add_argument("--tokens", type=int, default=16_384, help="of a GPU in a step")
    parser.add_argument("--efficiency", type=float, default=0.8, help="of what vendors state for a link")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    print(markdown(list(table(parse(arguments))), COLUMNS))


if __name__ == "__main__":
    main()
