"""Which plan computed an arm: in the terminal's table, on the pages, in compare.csv and in `show`."""

import pandas as pd
import pytest
from rich.console import Console

from hqsweep.report.compare.compare import compare
from hqsweep.report.pages import html, tables
from hqsweep.report.pages.folder import report_markdown, write
from hqsweep.report.pages.gemm_plans import plan_lines
from hqsweep.report.pages.panels import panels
from hqsweep.report.pages.show import show_run

NATIVE = "native: tensor cores of sm_90"
LATER = {"first_step": 3, "gemm_plan": {"head": {"fprop": "c x c: later"}}}


def terminal(renderable) -> str:
    console = Console(width=250, record=True, force_terminal=False)
    console.print(renderable)
    return console.export_text()


@pytest.fixture
def runs(make_sweep, fake):
    native = [fake.Run(arm="fp8", seed=seed, fmt="fp8", gemm=NATIVE, schedule=(LATER,)) for seed in range(2)]
    return make_sweep([fake.Run(fmt="bf16"), fake.Run(fmt="bf16", seed=1, gemm="other machine"), *native])


def test_lines_count_modules_and_name_the_step_of_a_change():
    plan = {"l0": {"fprop": "a x b: exact"}, "l1": {"fprop": "a x b: exact"}, "head": {"fprop": "c x c: exact"}}
    assert plan_lines(plan, [LATER]) == {
        "fprop": "a x b: exact (2); c x c: exact (1)",
        "fprop from step 3": "c x c: later (1)",
    }


@pytest.mark.slow
def test_every_report_says_which_plans_computed_an_arm(runs, tmp_path):
    comparison = compare(runs, "bf16")
    expected = {"bf16": "exact fp32; other machine", "fp8": f"{NATIVE}; later"}
    assert comparison.arms.set_index("arm")["gemm"].to_dict() == expected
    shown = terminal(tables.rich_table(comparison))
    assert all(f"gemm: {how} ({arm})" in shown for arm, how in expected.items())
    lines = [
        ("bf16", "fprop", "bf16 x bf16: exact fp32 (8)"),
        ("bf16", "fprop", "bf16 x bf16: other machine (8)"),
        ("fp8", "fprop", f"fp8 x fp8: {NATIVE} (8)"),
        ("fp8", "fprop from step 3", "c x c: later (1)"),
    ]
    assert list(tables.gemm_plans(comparison.frames.runs).rows) == lines
    page = html.render(comparison, panels(comparison)).replace("<wbr>", "")
    for shown in (page, report_markdown(comparison).replace("\\_", "_")):
        assert all(how in shown for _, _, how in lines)
    written = pd.read_csv(write(comparison, tmp_path / "out").parent / "compare.csv")
    assert dict(zip(written["arm"], written["gemm"], strict=True)) == expected


def test_arms_of_one_plan_share_a_line(make_sweep, fake):
    shown = terminal(tables.rich_table(compare(make_sweep(fake.three_arms()), "bf16")))
    assert shown.count("gemm: exact fp32") == 1 and "exact fp32 (" not in shown


def test_show_has_the_plans_of_all_stages(runs):
    shown = terminal(show_run(runs[-1], every=True)[0])
    assert f"fp8 x fp8: {NATIVE} (8)" in shown and "fprop from step 3: 'c x c: later (1)'" in shown
    assert "recipe_schedule" not in shown
