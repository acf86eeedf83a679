"""The tables' cells, and that a name from a config cannot break out of its cell."""

from html import unescape

import pandas as pd
import pytest
from rich.console import Console

from hqsweep.report.compare.compare import compare
from hqsweep.report.pages import html, tables
from hqsweep.report.pages.folder import report_markdown
from hqsweep.report.pages.panels import panels

pytestmark = pytest.mark.slow

NASTY = "<script>alert(1)</script> | [bold]\"q\" 'a' `c`\nnew"


@pytest.fixture
def comparison(make_sweep, fake):
    runs = [*fake.three_arms(), fake.Run(arm=NASTY, state="failed", reason="boom | <b>", steps=80)]
    return compare(make_sweep(runs), "bf16")


def terminal(renderable) -> str:
    console = Console(width=250, record=True, force_terminal=False)
    console.print(renderable)
    return console.export_text()


def test_terminal_table_has_every_arm_with_gap_interval_and_sentence(comparison):
    shown = terminal(tables.rich_table(comparison))
    row = comparison.arms.set_index("arm").loc["nvfp4"]
    for part in (
        f"{row['gap_pct']:+.2f}",
        f"{row['ci_low_pct']:+.2f} to {row['ci_high_pct']:+.2f}",
        f"{row['gap']:+.4f}",
        "1 failed",
        "baseline",
    ):
        assert part in shown
    assert "tokens/s" not in shown and "8,500" in report_markdown(comparison)
    assert row["sentence"] in " ".join(shown.split()) and "[bold]" in shown


def test_the_verdict_of_a_gap_inside_the_margin_says_so(make_sweep, fake):
    run = make_sweep(fake.three_arms())
    for margin, verdict in ((0.01, "worse"), (100, "worse (in margin)")):
        cells = tables.arms_table(compare(run, "bf16", margin=margin))
        assert [row[1] for row in cells.rows if row[0] == "nvfp4"] == [verdict]


def test_markdown_rows_keep_their_columns_and_hold_no_html(comparison):
    page = report_markdown(comparison)
    assert "<" not in page.replace("&lt;", "")
    for block in page.split("\n\n"):
        lines = [line.replace("\\\\", "").replace("\\|", "") for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) <= 1
    assert r"&lt;script&gt;alert(1)&lt;/script&gt; \| \[bold\]" in page and "## Runs without a result" in page


def test_config_diff_shows_only_what_differs(comparison):
    diff = tables.config_diff(comparison.frames.runs)
    linear = {f"recipe.linear.{tensor}" for tensor in ("input", "weight", "grad_output")}
    assert {row[0] for row in diff.rows} == linear | {"recipe.name"}
    assert dict(zip(diff.header, diff.rows[0], strict=True))["nvfp4"] == "nvfp4"


def test_provenance_says_where_runs_differ(make_sweep, fake):
    runs = make_sweep([fake.Run(), fake.Run(arm="mxfp8", threads=1), fake.Run(arm="nvfp4", threads=1)])
    cells = dict(tables.provenance(compare(runs, "bf16").frames.runs).rows)
    assert cells["threads"] == "2 (1 runs); 1 (2 runs)" and cells["device"] == "cpu"
    assert "run_id" not in cells and not any(name.startswith("gemm_plan") for name in cells)


def test_gemm_errors_and_plans_per_arm(comparison, fake):
    errors = tables.gemm_errors(comparison.frames.stats)
    assert [row[:3] for row in errors.rows if row[0] == "nvfp4"] == [("nvfp4", "fprop, dgrad, wgrad", "17.4")]
    assert (f"mxfp8, {NASTY}", "fprop", "mxfp8 x mxfp8: exact fp32 (8)") in tables.gemm_plans(
        comparison.frames.runs
    ).rows


def test_gemm_errors_name_the_worst_layer():
    rows = [("a", "fprop", layer, db) for layer, db in (("x", 30.0), ("y", 12.0), ("y", 14.0))]
    stats = pd.DataFrame(rows, columns=["arm", "tensor", "layer", "sqnr_db"])
    stats = stats.assign(direction="output", rel_l2=0.1, cosine=0.9)
    assert tables.gemm_errors(stats).rows == (("a", "fprop", "14.0", "13.0", "y", "1.00e-01", "0.900000"),)


def test_runs_without_a_result_are_listed_with_the_reason(comparison):
    assert [row[:4] for row in tables.unfinished_table(comparison).rows] == [
        (NASTY, "0", "failed (boom | <b>)", "80 of 200")
    ]


def test_damaged_runs_are_listed_on_every_page_with_the_file_and_what_to_do(make_sweep, fake):
    runs = make_sweep([*fake.three_arms(), fake.Run(arm="open", state="running", steps=20)])
    runs[4].jsonl("metrics").write_text("")
    comparison = compare(runs, "bf16")
    ((run, state, file, fault, remedy),) = tables.left_out_table(comparison).rows
    assert (run, state, file) == (f"sweep/{runs[4].name}", "damaged", "metrics.jsonl") and fault and "hqsweep" in remedy
    drawn = panels(comparison)
    for page in (html.render_light(comparison, drawn).replace("<wbr>", ""), report_markdown(comparison)):
        text = unescape(page).replace("\\", "")
        assert "Runs left out" in text and remedy in text and "; 2 runs are left out." in text
    assert [row[0] for row in tables.unfinished_table(comparison).rows] == ["open"]


def test_the_losses_of_a_row_differ_by_its_gap(make_sweep, fake):
    comparison = compare(make_sweep(fake.fork_study({"mxfp8": 0.004}, points=(40,))))
    rows = pd.DataFrame(tables.arms_table(comparison).rows, columns=tables.arms_table(comparison).header)
    baseline, arm = rows[tables.TRAINED].astype(float)
    assert arm - baseline == pytest.approx(float(rows["train gap (nats)"][1])) and "gap (nats)" not in rows
    assert tables.points_table(comparison).header == ("arm", "loss", "gap % at 40"), "one point is no mean of several"
    whole = tables.arms_table(compare(make_sweep(fake.three_arms(), "whole"), "bf16"))
    assert "val gap (nats)" in whole.header and tables.TRAINED not in whole.header
    runs = tables.runs_table(comparison)
    assert {tables.TRAINED, "train gap (nats)", "final val loss"} <= set(runs.header)
