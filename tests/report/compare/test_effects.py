"""Effects in a comparison: of forks and of whole runs, with arms that have no result."""

import json

import numpy as np
import pytest

from hqsweep.config.factorial import FactorialStudy
from hqsweep.report.compare.compare import compare, document
from hqsweep.report.figures.effects import effect_panels
from hqsweep.report.figures.svg import drawing
from hqsweep.report.pages.folder import write
from hqsweep.report.pages.tables import effects_table, rich_effects
from hqsweep.sweep.store import sweep_file

STUDY = FactorialStudy(
    factors=["input.rowwise", "weight.rowwise", "grad_output.columnwise", "input.columnwise"], resolution=4
)
COSTS = np.array([0.06, 0.02, 0.0, 0.01])
"""Nats of each factor, beside 0.01 that the first two cost together beyond their sum."""


def gap(levels: np.ndarray) -> float:
    return float(levels @ COSTS + 0.01 * levels[0] * levels[1])


def state(runs: list, study: FactorialStudy = STUDY) -> list:
    """The runs, of a sweep that states the study."""
    folder = runs[0].sweep_path
    stated = sweep_file.read(folder) | {"study": {"factorial": study.model_dump(mode="json"), "baseline": "baseline"}}
    sweep_file.write(folder, json.loads(json.dumps(stated)))
    return runs


@pytest.fixture
def forks(make_sweep, fake):
    def noisy(levels, arm):
        return lambda seed, point: gap(levels) + 1e-4 * np.random.default_rng([arm, seed, point]).normal()

    gaps = {name: noisy(levels, arm) if arm else 0.0 for arm, (name, levels) in enumerate(pairs())}
    return state(make_sweep([run for run in fake.fork_study(gaps, points=[40]) if run.arm != "bf16"]))


def pairs():
    return list(zip(STUDY.arms, STUDY.design.runs, strict=True))


def test_forks_give_the_costs_that_were_put_in(forks):
    comparison = compare(forks)
    table = comparison.effects.table.set_index("effect")
    half = 100 / 2  # of 2 nats, in %
    assert table.loc["input.rowwise", "pct"] == pytest.approx(half * 0.065, abs=0.01)  # half of what both cost beyond
    assert table.loc["grad_output.columnwise", "pct"] == pytest.approx(0, abs=0.01)
    pair = table.loc["input.rowwise x weight.rowwise"]
    assert pair["pct"] == pytest.approx(half * 0.01, abs=0.02) and pair["resolved"]
    assert pair["aliases"] == "grad_output.columnwise x input.columnwise"
    assert not table.loc["grad_output.columnwise", "resolved"] and (table["n"] == 4).all()
    assert "8 of 16 combinations: interactions of two are mixed with each other" in " ".join(comparison.notes)
    assert any(note.startswith("Main effects explain 100 % of") for note in comparison.notes)


@pytest.mark.slow
def test_the_effects_are_in_the_document_and_on_every_page(forks, tmp_path):
    comparison = compare(forks)
    effects = document(comparison)["effects"]
    assert [effect["effect"] for effect in effects[:4]] == [*map(STUDY.label, [(0,), (1,), (2,), (3,)])]
    shown = effects_table(comparison)
    assert shown.rows[0][0] == "input.rowwise" and shown.rows[0][5] == "yes" and len(rich_effects(comparison)) == 1
    page = write(comparison, tmp_path / "report")
    for name in ("report.html", "report_light.html", "report.md"):
        text = (page.parent / name).read_text()
        assert "Effects of the factors" in text and "input.rowwise x weight.rowwise" in text
    assert (page.parent / "figures/effects.svg").is_file() and (page.parent / "figures/effects.csv").is_file()


def test_the_figures_have_a_line_for_each_effect(forks):
    main, both = effect_panels(compare(forks))
    assert (main.heading, both.heading) == ("Main effects", "Interactions")
    assert len([trace for trace in main.figure.data if trace.mode == "lines"]) == 4
    assert "input.rowwise +3.2" in main.says and drawing(main).inner.count("<path") > 8


def test_whole_runs_have_effects_too(make_sweep, fake):
    runs = [
        fake.Run(arm=name, seed=seed, gap=gap(levels), fmt="mxfp8") for name, levels in pairs() for seed in range(3)
    ]
    comparison = compare(state(make_sweep(runs)))
    table = comparison.effects.table.set_index("effect")
    assert comparison.design == "whole run" and table.loc["input.rowwise", "pct"] > 1.5
    assert table["low"].notna().all()


def test_an_arm_without_a_result_is_said_and_the_others_give_the_effects(make_sweep, fake):
    lost = pairs()[3][0]
    study = FactorialStudy(factors=STUDY.factors, resolution="full")
    gaps = {name: gap(levels) + 1e-7 * levels[2] for name, levels in zip(study.arms, study.design.runs, strict=True)}
    runs = [run for run in fake.fork_study(gaps, trunks=3, points=[40]) if run.arm not in ("bf16", lost)]
    failed = [fake.Run(arm=lost, state="failed", reason="x", trunk=f"trunk-s{s}", seed=s, point=40) for s in range(3)]
    comparison = compare(state(make_sweep(runs + failed), study))
    assert comparison.effects.table["pct"].iloc[0] == pytest.approx(3.25, abs=1e-3)
    assert any("over the other 15 arms" in note for note in comparison.notes)


def test_too_few_arms_give_no_effects_and_other_sweeps_none(make_sweep, fake):
    kept = [name for name, _ in pairs()][:5]
    runs = [run for run in fake.fork_study(dict.fromkeys(kept, 0.01), points=[40]) if run.arm != "bf16"]
    comparison = compare(state(make_sweep(runs)))
    assert comparison.effects.table.empty and any("do not tell the effects apart" in note for note in comparison.notes)
    plain = compare(make_sweep(fake.fork_study({"nvfp4": 0.01}), name="other"), "bf16")
    assert plain.effects.table.empty and "effects" not in document(plain) and effect_panels(plain) == []
