"""A training on many GPUs on paper: its inputs are those that were measured, what it says travels is what a run sends,
its memory is that of measured runs, and numbers worked by hand; and the table of reports/distributed_plan.md."""

import json
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks import parallel_plan
from benchmarks.parallel_plan import Model, Over
from benchmarks.rows import markdown
from benchmarks.step_cases import SIZES
from hqsweep.config.job import parse
from hqsweep.config.model import ffn_width
from hqsweep.nn.linear_loss import CHUNK_BYTES
from hqsweep.parallel.data import units
from hqsweep.parallel.fsdp_exchanges import GATHERS, SUMS
from hqsweep.parallel.mesh import Ranks, build_mesh
from hqsweep.parallel.shards.fsdp_state import groups_of
from hqsweep.parallel.wire.spawn import spawn_ranks
from hqsweep.train import data
from hqsweep.train.loop import Trainer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "reports" / "distributed_plan.md"
H200 = "NVIDIA H200"
SMALL = Model(layers=2, dim=64, ffn=192, heads=2, kv_heads=2, vocabulary=16, context=32)
"""The model of the run whose exchanges are counted."""
HELD = ("bf16", "mxfp8:held", "nvfp4:held")
SHARDED, COPIED = {"dp_shard": 2}, {"dp_shard": 2, "dp_replicate": 2}
RUNS = {
    2: [("bf16", SHARDED, False), ("mxfp8", SHARDED, False), ("mxfp8:held", SHARDED, False),
        ("nvfp4:held", SHARDED, False), ("mxfp8", SHARDED, True), ("mxfp8:held", SHARDED, True)],
    4: [("mxfp8:held", COPIED, False)],
}  # fmt: skip
"""Number of ranks -> recipe, axes and whether layers are recomputed, of each run of so many."""


def measured(benchmark, section):
    """The rows of a section that H200s gave."""
    lines = (ROOT / "reports" / "benchmarks" / f"{benchmark}.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if (row["section"], row["device"]) == (section, H200)]


def test_links_inside_a_machine_have_the_measured_rates():
    wire = measured("ranks", "wire")[-1]
    rates = [wire["gather_gbs"] * 1e9, wire["reduce_gbs"] * 1e9]
    assert rates == pytest.approx([parallel_plan.GATHER, parallel_plan.REDUCE], rel=1e-3)
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text()
    [least] = re.findall(r"A copy engine writes (\d+) to \d+ GB/s in a graph", notes)
    assert int(least) * 1e9 == parallel_plan.COPIES
    assert GATHERS.most == SUMS.most == parallel_plan.MOST_COPIED


def test_steps_have_the_measured_rates():
    kind = {"size": "L", "mode": "auto", "deterministic": "on"}
    rows = [row for row in measured("step", "time") if all(row.get(k) == v for k, v in kind.items())]
    rates = {row["recipe"]: row["tflops"] * 1e12 for row in rows}  # the last of each
    assert {recipe: rates[recipe] for recipe in parallel_plan.RATES} == pytest.approx(parallel_plan.RATES, rel=1e-3)


def test_memory_is_that_of_two_ranks():
    """Of M and L in every recipe that was measured, within 3 %."""
    assert parallel_plan.CHUNK == CHUNK_BYTES
    rows = [row for row in measured("ranks", "time") if row["ranks"] == 2 and row["case"] == "hqsweep"]
    assert {(row["size"], row["recipe"]) for row in rows} >= {("M", "bf16"), ("L", "mxfp8"), ("L", "mxfp8:held")}
    for row in rows:
        size, config = SIZES[row["size"]], SIZES[row["size"]].model
        shape = {"layers": config.layers, "dim": config.dim, "ffn": ffn_width(config), "context": size.context}
        model = Model(heads=config.heads, kv_heads=config.heads, vocabulary=size.vocabulary, **shape)
        kept, _ = parallel_plan.memory(model, row["recipe"], 2, size.tokens)
        assert kept * 1e-9 == pytest.approx(row["peak_gb"], rel=0.03), row


class Counting:
    """torch's own exchange of a unit, and the bytes of the whole unit at each."""

    def __init__(self, inner, counted, key):
        self.inner, self.counted, self.key = inner, counted, key

    def allocate(self, *args, **options):
        return self.inner.allocate(*args, **options)

    def __call__(self, output_tensor, input_tensor, *args, **options):
        self.counted.append((*self.key, max(output_tensor.nbytes, input_tensor.nbytes)))
        return self.inner(output_tensor, input_tensor, *args, **options)


def exchanged_in_all(rank, runs):
    return [exchanged(*run) for run in runs]


def exchanged(recipe, dims, recompute):
    """(whether gradients are summed, unit, bytes) of each exchange of the second step of a run, and the bytes of
    all-reduces."""
    linear, _, held = recipe.partition(":")
    config = parse(
        {
            "job": "convergence", "sweep": "t", "recipe": {"name": "r", "linear": linear}, "stats": {"every": 0},
            "model": {"dim": SMALL.dim, "layers": SMALL.layers, "heads": SMALL.heads, "ffn": SMALL.ffn,
                      "quantized_weights": bool(held)},
            "data": {"source": "markov", "markov": {"length": 20000}},
            "train": {"steps": 3, "batch": 8, "context": SMALL.context, "eval_every": 100, "device": "cpu",
                      "parallel": dims, "recompute": "layer" if recompute else "none"},
        }
    )  # fmt: skip
    dims, here, counted, reduced = config.train.parallel, torch.device("cpu"), [], []
    ranks = Ranks(dims=dims, mesh=build_mesh(dims, "cpu"), device=here)
    trainer = Trainer(config, data.load(config.data), config.recipe.build(), here, ranks)
    model, all_reduce = trainer.adapter.model, torch.distributed.all_reduce
    for unit in units(model):
        name = {model: "embedding", model.head: "head"}.get(unit, "layer")
        [group] = groups_of(unit)
        unit.set_custom_all_gather(Counting(group._all_gather_comm, counted, (False, name)))
        unit.set_custom_reduce_scatter(Counting(group._reduce_scatter_comm, counted, (True, name)))

    def count(tensor, *args, **options):
        reduced.append(tensor.nbytes)
        return all_reduce(tensor, *args, **options)

    steps = trainer.steps()
    next(steps)  # which learns whether layers are recomputed
    counted.clear()
    with patch.object(torch.distributed, "all_reduce", count):
        next(steps)
    return sorted(counted), sorted(reduced)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
@pytest.mark.parametrize("world", RUNS)
def test_a_run_exchanges_what_the_plan_says(world):
    """Gradients of every unit in float32, and weights as the plan has them, to the byte but for gains of norms, which
    travel in float32, and the scales of whole tensors of nvfp4, 4 bytes for each rank and linear."""
    gains = {"layer": 4 * 2 * SMALL.dim, "head": 0, "embedding": 4 * SMALL.dim}
    runs = spawn_ranks(world, exchanged_in_all, RUNS[world])[0]
    for (recipe, dims, recompute), (counted, reduced) in zip(RUNS[world], runs, strict=True):
        scales = {"layer": 4 * 4 * 2} if recipe.startswith("nvfp4") else {}
        planned = [
            (is_sum, unit, nbytes + gains[unit] + (0 if is_sum else scales.get(unit, 0)))
            for _, is_sum, unit, nbytes, count in parallel_plan.exchanges(SMALL, recipe, recompute)
            for _ in range(count)
        ]
        assert counted == sorted(planned), (recipe, recompute)
        sums = sorted(nbytes / 2 for is_sum, _, nbytes in counted if is_sum)
        assert [nbytes for nbytes in reduced if nbytes in sums] == (sums if dims == COPIED else [])


def test_models_have_the_parameters_of_their_paper():
    """8.03 and 70.55 billion."""
    assert parallel_plan.MODELS["8B"].parameters == pytest.approx(8.03e9, rel=1e-3)
    assert parallel_plan.MODELS["70B"].parameters == pytest.approx(70.55e9, rel=1e-3)


def test_one_row_by_hand():
    """8B in held mxfp8 on 16 GPUs, sharded in each machine: 6,979,321,856 parameters in products, and 525,336,576 in
    each of the embeddings. Codes of a layer are few enough bytes for copy engines; what else travels goes by NCCL."""
    row = parallel_plan.row("8B", "mxfp8:held", Over(16, 8, 50e9), 1000)
    products, table, every = 6_979_321_856, 525_336_576, 8_029_995_008
    codes, ends = 7 / 8 * products * 33 / 16, 7 / 8 * 6 * table
    scatter, reduce = 7 / 8 * 4 * every, 2 * 1 / 2 * 4 * every / 8
    assert row["gather GB"] == pytest.approx((codes + ends) / 1e9) == pytest.approx(15.35, abs=0.01)
    assert row["gradients GB"] == pytest.approx((scatter + reduce) / 1e9)
    wire = codes / 361e9 + ends / 243.9e9 + scatter / 235.8e9 + reduce / 50e9
    assert row["wire s"] == pytest.approx(wire)
    layers = 2 * products + 2 * 32 * 4096 * 8192
    forward = 1000 * (layers + 2 * table) / 498.1e12
    assert row["compute s"] == pytest.approx(3 * forward)
    layer = products / 32
    first = 7 / 8 * (4 * table / 243.9e9 + layer * 33 / 32 / 361e9)
    last = 4 * (layer + table) * (7 / 8 / 235.8e9 + 1 / 8 / 50e9)
    ahead = 7 / 8 * (31 * layer * 33 / 32 / 361e9 + 2 * table / 243.9e9)
    behind = wire - first - last - ahead
    assert forward > ahead and 2 * forward < behind
    exposed = first + last + behind - 2 * forward
    assert row["exposed %"] == pytest.approx(100 * exposed / (exposed + 3 * forward))


def test_memory_by_hand():
    row = parallel_plan.row("8B", "mxfp8:held", Over(8, 8), 16_384)
    products, table, every = 6_979_321_856, 525_336_576, 8_029_995_008
    s = 33 / 32 * (3 * 4096 + 14336) + 2 * (2 * 4096 + 2 * 1024 + 2 * 14336) + 8 * 4096
    state, ends = every / 8 * 12 + products / 8 * 33 / 16, 10 * table + 2**30
    assert row["memory GB"] == pytest.approx((state + ends + 2 * products / 32 * (33 / 32 + 4) + 16384 * 32 * s) / 1e9)
    again = state + ends + 2 * products / 32 * (33 / 16 + 4) + 16384 * (s + 4 * 32 * 4096)
    assert row["recomputed GB"] == pytest.approx(again / 1e9)


def test_recomputed_layers_take_a_third_more_compute_and_gather_held_codes_again():
    model = parallel_plan.MODELS["8B"]
    once, again = (parallel_plan.row("8B", "nvfp4:held", Over(8, 8), 1000, flag) for flag in (False, True))
    more = 1000 * (2 * model.in_products + 2 * 32 * 4096 * 8192) / 464.5e12
    assert again["compute s"] - once["compute s"] == pytest.approx(more)
    assert again["gather GB"] - once["gather GB"] == pytest.approx(7 / 8 * 0.5625 * model.in_products / 1e9)


@pytest.mark.parametrize(("network", "rates"), [(10e9, (80e9, 80e9)), (40e9, (243.9e9, 235.8e9))])
def test_a_longer_shard_passes_all_adapters_of_a_machine(network, rates):
    row = parallel_plan.row("8B", "bf16", Over(64, 64, network), 1000)
    wire = row["gather GB"] * 1e9 / rates[0] + row["gradients GB"] * 1e9 / rates[1]
    assert row["wire s"] == pytest.approx(wire)


def test_the_page_has_the_table_and_its_inputs():
    table = markdown(list(parallel_plan.table(parallel_plan.parse([]))), parallel_plan.COLUMNS)
    page = PAGE.read_text()
    assert table.strip() in page
    gigabytes = {f"{rate * 1e-9:g} GB/s" for rate in (parallel_plan.COPIES, parallel_plan.NETWORK)}
    rates = gigabytes | {f"{parallel_plan.GATHER * 1e-9:g}", f"{parallel_plan.REDUCE * 1e-9:g} GB/s"}
    assert all(text in page for text in rates)


def test_the_page_says_what_the_rows_say():
    """The shares that its last section has in words."""
    less = {}
    for name in parallel_plan.MODELS:
        rows = [parallel_plan.row(name, recipe, Over(64, 64), 16_384) for recipe in HELD]
        gathers = [row["gather GB"] for row in rows]
        wholes = [row["gather GB"] + row["gradients GB"] for row in rows]
        less[name] = [f"{100 - 100 * part / of[0]:.0f}" for of in (gathers, wholes) for part in of[1:]]
    page = " ".join(PAGE.read_text().split())
    a, b = less["8B"], less["70B"]
    assert f"{a[0]} % (mxfp8) and {a[1]} % (nvfp4) less to gather than bfloat16 for 8B, {b[0]} and {b[1]} %" in page
    assert f"Of all bytes of FSDP that is {a[2]} and {a[3]} % for 8B, {b[2]} and {b[3]} % for 70B" in page
    short = [f"{parallel_plan.row('8B', recipe, Over(64, 64), 1024)['exposed %']:.0f}" for recipe in HELD]
    assert f"with FSDP {short[0]} % of a step is exposed in bf16, {short[1]} and {short[2]} % in held recipes" in page
