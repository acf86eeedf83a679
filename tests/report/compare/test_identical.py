"""Arms that are their baseline again: found by operands and losses, in whole runs and forks, and said everywhere."""

import pytest

from hqsweep.report.compare.compare import compare, document
from hqsweep.report.compare.identical import NOTHING, SAME
from hqsweep.report.compare.notes import headline
from hqsweep.report.gate.ci import checked, verdict_rows
from hqsweep.report.pages.folder import write
from hqsweep.report.pages.tables import rich_table

SAID = "identical to bf16: nothing was quantized"


def whole(fake, **arms):
    """Runs of bf16, a null arm, and `arms`: name -> what differs from bf16's run of the same seed."""
    every = {"bf16": {}, "null": {"init_noise": 0.01, "gap": 0.001}} | arms
    return [
        fake.Run(**({"arm": arm, "seed": seed, "fmt": "bf16"} | changes))
        for arm, changes in every.items()
        for seed in range(3)
    ]


def identities(comparison):
    """Arm -> why it is identical, "" where it is not."""
    return dict(zip(comparison.arms["arm"], comparison.arms["identical"], strict=True))


@pytest.fixture
def nothing(make_sweep, fake):
    """A study of an arm that quantizes nothing, and of one that does."""
    return compare(make_sweep(whole(fake, mxfp8={}, nvfp4={"fmt": "nvfp4", "gap": 0.02})))


def test_an_arm_that_quantized_nothing_has_its_own_verdict(nothing):
    row = nothing.arms.set_index("arm").loc["mxfp8"]
    assert (row["verdict"], row["identical"], row["n"], row["gap"], row["gap_pct"]) == ("identical", NOTHING, 3, 0, 0)
    assert row["sentence"].startswith(f"{SAID}, and the losses are equal over 3 seeds. Leave the arm out")
    assert "mxfp8" not in nothing.estimates and set(nothing.points["arm"]) == {"null", "nvfp4"}
    assert not any("'mxfp8'" in note for note in nothing.notes)
    (arm,) = [arm for arm in document(nothing)["arms"] if arm["arm"] == "mxfp8"]
    assert (arm["verdict"], arm["identical"], arm["apart"]) == ("identical", NOTHING, None)


@pytest.mark.slow
def test_it_is_said_in_the_headline_the_pages_the_csv_and_the_terminal(nothing, tmp_path):
    assert headline(nothing).split("; ")[1] == f"mxfp8 is {SAID}"
    page = write(nothing, tmp_path / "report")
    texts = {path.name: path.read_text() for path in page.parent.iterdir() if path.suffix in (".html", ".md", ".csv")}
    for name in ("report.html", "report_light.html", "report.md"):
        assert texts[name].count(SAID) >= 3, name  # headline, table, sentence
    assert SAID in texts["compare.csv"]
    table = rich_table(nothing)
    assert "identical" in [row[1] for row in table.rows] and SAID in table.caption.plain


def test_a_check_fails_and_so_does_its_case(nothing):
    good, line = checked(nothing)
    assert not good and f"'mxfp8' is {SAID}" in line
    cases = {row["case"]: row["status"] for row in verdict_rows(nothing)}
    assert cases["mxfp8"] == "FAIL" and cases["null"] == "PASS"


def test_forks_too(make_sweep, fake):
    runs = fake.fork_study({"mxfp8": lambda trunk, point: 0.0, "nvfp4": lambda trunk, point: 0.01})
    high = [fake.Run(**vars(run) | ({} if run.arm == "nvfp4" else {"fmt": "bf16"})) for run in runs]
    comparison = compare(make_sweep(high))
    assert identities(comparison) == {"bf16": "", "mxfp8": NOTHING, "nvfp4": ""}
    assert comparison.arms.set_index("arm").at["mxfp8", "n"] == 4


DIFFERENT = {
    "one layer is quantized, and no loss shows it": {"gemm": "exact fp32 in another layer"},
    "the embedding is quantized": {"gap": 0.01},
    "the losses differ in one digit": {"final": 2.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", DIFFERENT.values(), ids=DIFFERENT)
def test_other_operands_or_other_losses_are_another_arm(make_sweep, fake, changes):
    fmt = {} if "gemm" in changes else {"overrides": ({"name": "x"},), "fmt": "fp32"}
    assert set(identities(compare(make_sweep(whole(fake, mxfp8=fmt | changes)))).values()) == {""}


def test_a_machine_that_does_not_repeat_itself_is_no_recipe(make_sweep, fake):
    """High precision and equal configs, and yet other losses."""
    comparison = compare(make_sweep(whole(fake, mxfp8={"gap": 0.01})))
    row = comparison.arms.set_index("arm").loc["mxfp8"]
    assert (row["verdict"], row["identical"]) == ("identical", NOTHING) and row["gap_pct"] > 0.3
    assert "; the losses differ by +0." in row["sentence"] and "which is not the recipe's" in row["sentence"]


def test_a_quantized_baseline_and_its_twin(make_sweep, fake):
    runs = [fake.Run(arm=arm, seed=seed) for arm in ("mxfp8", "again") for seed in range(3)]
    comparison = compare(make_sweep(runs), "mxfp8")
    assert identities(comparison) == {"mxfp8": "", "again": SAME}
    assert headline(comparison) == "again is identical to mxfp8: the same operands."
    moved = [fake.Run(arm="again", seed=seed, gap=0.01) for seed in range(3)]
    other = compare(make_sweep([*runs[:3], *moved], name="moved"), "mxfp8")
    assert set(identities(other).values()) == {""}, "quantized alike by the plans, but a source may differ"


def test_arms_that_are_each_other_are_named(make_sweep, fake):
    alike = {"fmt": "mxfp8", "gap": 0.02}
    comparison = compare(make_sweep(whole(fake, mxfp8=alike, twin=alike)))
    assert identities(comparison)["twin"] == ""
    assert any(note.startswith("'mxfp8' and 'twin' are identical to each other: ") for note in comparison.notes)


def test_each_baseline_has_its_own_twins(make_sweep, fake):
    """With two baselines, an arm is held against that of its own settings."""
    runs = []
    for lr, gap in (("1", 0.0), ("2", 0.05)):
        for arm in ("bf16", "mxfp8"):
            runs += [fake.Run(arm=f"{arm}_lr-{lr}", recipe=arm, seed=seed, gap=gap, fmt="bf16") for seed in range(3)]
    assert identities(compare(make_sweep(runs), "bf16")) == {
        "bf16_lr-1": "", "bf16_lr-2": "", "mxfp8_lr-1": NOTHING, "mxfp8_lr-2": NOTHING,
    }  # fmt: skip


def test_a_schedule_counts_and_runs_without_a_plan_are_not_judged(make_sweep, fake):
    later = ({"first_step": 100, "gemm_plan": {"layers.0.attn.qkv": {"fprop": "mxfp8 x mxfp8: exact"}}},)
    empty = ({"first_step": 100, "gemm_plan": {}},)
    comparison = compare(make_sweep(whole(fake, late={"schedule": later}, vain={"schedule": empty})))
    assert identities(comparison) == {"bf16": "", "null": "", "late": "", "vain": NOTHING}
