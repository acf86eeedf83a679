"""A training over 8 to 1,024 GPUs on paper: bytes a step, memory of a GPU, and the share of time in communication.

    python -m benchmarks.parallel_plan [--recipes bf16 mxfp8:held nvfp4:held] [--gpus 8 64 256 1024] [--recompute]

Every GPU takes `tokens` tokens a step (weak scaling), and weights are sharded over the GPUs of a row's `shard`: all of
them (FSDP), or the eight of a machine with the gradients of machines all-reduced (HSDP). What travels is what runs have
fully_shard send (hqsweep.parallel.data.shard), and tests count it in one. P are parameters in the layers' products, V D
those of each of both embeddings, P_all = P + 2 V D, b bytes an element of the operand that a pass reads, W the GPUs of
the shard and R = GPUs / W the replicas. Recipes named `:held` have model.quantized_weights, whose codes and scales
travel; all other weights of products do in bfloat16 (b = 2). A GPU sends as much as it receives, in bytes:

    gather      (W - 1) / W (P (b_row + b_column) + 4 V D + 2 V D)    forward rowwise, backward columnwise; the
                embedding once in float32, the head once in bfloat16; --recompute: held rowwise codes once more
    gradients   (W - 1) / W 4 P_all + 2 (R - 1) / R 4 P_all / W    reduce-scatter, then all-reduce: in every recipe
                float32, as the weights (or their masters) are and no mp_policy narrows them
memory of a GPU as torch's allocator counts it, at the beginning of backward or, where that is more, at its end:
    state       P_all / W (4 + 4 + 4) + P / W (b_row + b_column if held)    weights or masters, moments, codes
    layers      2 P / layers (b_column + 4)   two layers gathered, and their gradients in float32
    ends        10 V D + 2^30   embedding in float32 and head in bfloat16, kept from forward on, the head's gradient in
                float32, and a chunk of logits (hqsweep.nn.linear_loss)
    saved       tokens layers s, with s = b_x (3 D + F) + 2 (2 D + 2 D_kv + 2 F) + 8 D: inputs of linears as codes; q,
                k, v, attention's output, gate and up in bfloat16, the residual stream twice in float32. In bf16
                attention's output is an input: 2 D less. Or, if more, gradients of shards, P_all / W 4
`memory GB` has all of it, `recomputed GB` the residual stream of every layer (4 D) and s of one layer, as with
train.recompute=layer, which takes a third more compute. The formulas give what two ranks took within 3 %.
time:
    compute     tokens (6 P + 6 D V + 6 layers D context) / rate, causal attention counted at half, at the measured
                rate of a whole step on one H200; --recompute: layers' forward once more
    wire        units that unit_comms exchanges by copy engines at COPIES; all others, within a machine, at NCCL's
                GATHER and REDUCE. Of a shard over several machines at that rate, or at the rate of all adapters of a
                machine together where that is less, as each byte enters a machine once. Between replicas, where every
                GPU has a shard of its own to reduce, over its own adapter (NETWORK, which is assumed)

`wire %` is wire / (wire + compute), as if nothing overlapped. `exposed %` has what nothing can hide, the gathers of the
embedding and the first layer before forward and the sums of both behind backward, and of the rest what takes longer
than the products of its pass.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.rows import Row, markdown

NODE = 8
"""The number of GPUs that NVLink joins."""
GATHER, REDUCE = 243.9e9, 235.8e9
"""The bytes a second that a GPU receives by NCCL over NVLink, in messages of 256 MiB between two H200s
(reports/benchmarks/ranks.md, wire). With more GPUs of one machine it was not measured."""
COPIES = 361e9
"""The least that a copy engine writes a second in a CUDA graph, between two H100s (benchmarks/NOTES.md)."""
MOST_COPIED = 1 << 28
"""The bytes that a GPU receives of a unit, at most, for copy engines to exchange it (unit_comms)."""
NETWORK = 40e9
"""The bytes a second of a GPU's adapter between machines: an assumption, four fifths of the 50e9 that 400 Gbit/s are.
Nothing was measured between machines."""
RATES = {"bf16": 505.3e12, "mxfp8": 498.1e12, "nvfp4": 464.5e12}
"""The FLOP/s of a whole training step at size L on one H200 (reports/benchmarks/step.md)."""
CODES = {"bf16": 2.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""The bytes an element of an operand, scales included, in either direction."""
RECIPES = ("bf16", "mxfp8", "mxfp8:held", "nvfp4", "nvfp4:held")
GRADIENT = 4
"""The bytes an element of the gradients that travel, and that shards keep."""
CHUNK = 1 << 30
"""The bytes of logits that exist at once."""
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
    def in_layer(self) -> int:
        """The parameters of the linears of a layer."""
        return 2 * self.dim * self.dim + 2 * self.dim * self.kv_dim + 3 * self.dim * self.ffn

    @property
    def in_products(self) -> int:
        """The parameters of the linears of all layers."""
        return self.layers * self.in_layer

    @property
    def in_table(self) -> int:
        """The parameters of the embedding, and of the output projection."""
        return self.vocabulary * self.dim

    @property
    def parameters(self) -> int:
        """All parameters but the gains of norms."""
        return self.in_products + 2 * self.in_table


MODELS = {
    "8B": Model(layers=32, dim=4096, ffn=14_336, heads=32, kv_heads=8),
    "70B": Model(layers=80, dim=8192, ffn=28_672, heads=64, kv_heads=8),
}


class Exchange(NamedTuple):
    """Exchanges of units of fully_shard that are alike."""

    when: str
    """"first", before any product; in "forward" or "backward"; or "last", behind all products."""
    is_sum: bool
    """Whether gradients are summed; else weights are gathered."""
    unit: str
    nbytes: float
    """The bytes of the whole unit."""
    count: int = 1


class Over(NamedTuple):
    """The GPUs of a training, how many of them share out one copy, and the bytes a second of each one's adapter."""

    gpus: int
    shard: int
    network: float = NETWORK

    @property
    def replicas(self) -> int:
        return self.gpus // self.shard


def is_held(recipe: str) -> bool:
    return recipe.endswith(":held")


def codes(recipe: str) -> float:
    """The bytes an element of an operand."""
    return CODES[recipe.removesuffix(":held")]


def exchanges(model: Model, recipe: str, recompute: bool = False) -> list[Exchange]:
    """All that a step exchanges, but for gains of norms; tests/benchmarks/test_parallel_plan.py counts it in a run."""
    layer, table, held = model.in_layer, model.in_table, is_held(recipe)
    row = layer * (codes(recipe) if held else 2)
    column = 2 * row if recompute and held else row  # backward reads rowwise operands, too
    return [
        Exchange("first", False, "embedding", 4 * table),
        Exchange("first", False, "layer", row),
        Exchange("forward", False, "layer", row, model.layers - 1),
        Exchange("forward", False, "head", 2 * table),
        Exchange("backward", False, "layer", column, model.layers),
        Exchange("backward", True, "head", GRADIENT * table),
        Exchange("backward", True, "layer", GRADIENT * layer, model.layers - 1),
        Exchange("last", True, "layer", GRADIENT * layer),
        Exchange("last", True, "embedding", GRADIENT * table),
    ]


def received(exchange: Exchange, over: Over) -> tuple[float, float]:
    """The bytes that a GPU receives of one exchange, from its shard and from replicas of it."""
    inside = (over.shard - 1) / over.shard * exchange.nbytes
    return inside, exchange.is_sum * 2 * (over.replicas - 1) / over.replicas * exchange.nbytes / over.shard


def seconds(exchange: Exchange, over: Over) -> float:
    """The time of all of these exchanges, one after the other."""
    inside, between = received(exchange, over)
    rate = REDUCE if exchange.is_sum else GATHER
    if over.shard > NODE:
        rate = min(rate, NODE * over.network)
    elif inside <= MOST_COPIED:
        rate = COPIES
    return exchange.count * (inside / rate + between / over.network)


def memory(model: Model, recipe: str, shard: int, tokens: int) -> tuple[float, float]:
    """The bytes of a GPU, and those with recomputed layers; the module's docstring has the formulas."""
    held, own = is_held(recipe), codes(recipe)
    state = model.parameters / shard * 12 + (model.in_products / shard * 2 * own if held else 0)
    gathered = own if held else 2
    ends = 10 * model.in_table + CHUNK
    inputs = own * (3 * model.dim + model.ffn) - (2 * model.dim if recipe == "bf16" else 0)
    layer = tokens * (inputs + 2 * (2 * model.dim + 2 * model.kv_dim + 2 * model.ffn) + 8 * model.dim)
    gradients = model.parameters / shard * GRADIENT
    kept = state + 2 * model.in_layer * (gathered + GRADIENT) + ends + max(model.layers * layer, gradients)
    again = 2 * model.in_layer * (gathered * (2 if held else 1) + GRADIENT)  # held: both directions are there
    stream = max(4 * tokens * model.layers * model.dim, gradients)
    return kept, state + again + ends + layer + stream


def passes(model: Model, recipe: str, tokens: int, recompute: bool = False) -> tuple[float, float]:
    """The seconds of the products of forward, and of those of backward."""
    layers = 2 * model.in_products + 2 * model.layers * model.dim * model.context
    forward = layers + 2 * model.in_table
    rate = RATES[recipe.removesuffix(":held")] / tokens
    return forward / rate, (2 * forward + recompute * layers) / rate


def row(name: str, recipe: str, over: Over, tokens: int, recompute: bool = False) -> Row:
    """One row of the table."""
    model = MODELS[name]
    every = exchanges(model, recipe, recompute)
    spent = dict.fromkeys(("first", "forward", "backward", "last"), 0.0)
    moved = {False: 0.0, True: 0.0}
    for exchange in every:
        spent[exchange.when] += seconds(exchange, over)
        moved[exchange.is_sum] += exchange.count * sum(received(exchange, over))
    forward, backward = passes(model, recipe, tokens, recompute)
    compute, wire = forward + backward, sum(spent.values())
    hidden = min(spent["forward"], forward) + min(spent["backward"], backward)
    exposed = wire - hidden
    kept, recomputed = memory(model, recipe, over.shard, tokens)
    return {
        "model": name, "recipe": recipe, "GPUs": over.gpus, "shard": over.shard, "gather GB": moved[False] * 1e-9,
        "gradients GB": moved[True] * 1e-9, "memory GB": kept * 1e-9, "recomputed GB": recomputed * 1e-9,
        "compute s": compute, "wire s": wire, "wire %": 100 * wire / (wire + compute),
        "exposed %": 100 * exposed / (exposed + compute),
    }  # fmt: skip


def table(args: argparse.Namespace) -> Iterator[Row]:
    """Rows of every model, recipe, number of GPUs, and way to shard them."""
    for name in args.models:
        for gpus in args.gpus:
            for shard in sorted({min(NODE, gpus), gpus}):
                for recipe in args.recipes:
                    yield row(name, recipe, Over(gpus, shard, args.network * 1e9), args.tokens, args.recompute)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["bf16", "mxfp8:held", "nvfp4:held"]
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=default, metavar="RECIPE")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--gpus", nargs="+", type=int, default=[8, 64, 256, 1024])
    parser.add_argument("--tokens", type=int, default=16_384, help="of a GPU in a step")
    parser.add_argument("--network", type=float, default=NETWORK * 1e-9, help="GB/s of a GPU between machines: assumed")
    parser.add_argument("--recompute", action="store_true", help="layers run again in backward")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    print(markdown(list(table(parse(arguments))), COLUMNS))


if __name__ == "__main__":
    main()
