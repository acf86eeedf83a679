"""A training on many GPUs on paper: numbers worked by hand, and the table of docs/distributed_plan.md."""

from pathlib import Path

import pytest

from benchmarks import parallel_plan
from benchmarks.rows import markdown

PAGE = Path(__file__).parents[2] / "docs" / "distributed_plan.md"


def test_models_have_the_parameters_of_their_paper():
    """8.03 and 70.55 billion."""
    assert parallel_plan.MODELS["8B"].parameters == pytest.approx(8.03e9, rel=1e-3)
    assert parallel_plan.MODELS["70B"].parameters == pytest.approx(70.55e9, rel=1e-3)


def test_one_row_by_hand():
    """8B in mxfp8 on 16 GPUs, sharded in each node: 6,979,321,856 parameters in products and 1,050,673,152 beside."""
    row = parallel_plan.row("8B", "mxfp8", 16, 8, 1000, 1.0)
    gather = 7 / 8 * (6_979_321_856 * 33 / 16 + 4 * 1_050_673_152)
    scatter, reduce = 7 / 8 * 2 * 8_029_995_008, 2 * 1 / 2 * 2 * 8_029_995_008 / 8
    assert row["gather GB"] == pytest.approx(gather / 1e9) == pytest.approx(16.27, abs=0.01)
    assert row["gradients GB"] == pytest.approx((scatter + reduce) / 1e9)
    assert row["wire s"] == pytest.approx((gather + scatter) / 450e9 + reduce / 50e9)
    flop = 6 * 6_979_321_856 + 6 * 128_256 * 4096 + 6 * 32 * 4096 * 8192
    assert row["compute s"] == pytest.approx(1000 * flop / 495e12)
    saved = 33 / 32 * (3 * 4096 + 14336) + 2 * (3 * 4096 + 2 * 1024 + 2 * 14336) + 8 * 4096
    state = 8_029_995_008 / 8 * 16 + 6_979_321_856 / 8 * 33 / 16 + 2 * 6_979_321_856 / 32 * (33 / 16 + 2)
    assert row["memory GB"] == pytest.approx((state + 1000 * 32 * saved) / 1e9)
    assert row["recomputed GB"] == pytest.approx((state + 1000 * saved + 4 * 1000 * 32 * 4096) / 1e9)


def test_a_longer_shard_passes_all_adapters_of_a_node():
    row = parallel_plan.row("8B", "bf16", 64, 64, 1000, 0.5)
    assert row["wire s"] == pytest.approx((row["gather GB"] + row["gradients GB"]) * 1e9 / (0.5 * 400e9))


def test_the_page_has_the_table():
    table = markdown(list(parallel_plan.table(parallel_plan.parse([]))), parallel_plan.COLUMNS)
    assert table.strip() in PAGE.read_text()
