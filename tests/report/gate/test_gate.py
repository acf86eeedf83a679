"""The gate's verdicts and exit codes."""

import json
import math
import re
import shutil

import pytest
from rich.console import Console

from hqsweep.errors import UserError
from hqsweep.report.compare.compare import compare
from hqsweep.report.gate.baseline import read_baseline, sealed
from hqsweep.report.gate.baseline_update import update
from hqsweep.report.gate.gate import gate
from hqsweep.report.gate.verdict import Verdict, Verdicts, append, gate_markdown
from hqsweep.sweep.store.run_dir import RunDir

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stored_once(fake, tmp_path_factory):
    """A baseline file of three arms by three seeds."""
    folder = tmp_path_factory.mktemp("stored")
    runs = fake.write_sweep(folder / "runs/stored", fake.three_arms())
    assert not update([RunDir(path) for path in runs], folder / "sweep.json").refused
    return folder / "sweep.json"


@pytest.fixture
def stored(stored_once, tmp_path):
    """A copy of that file."""
    (tmp_path / "baselines").mkdir()
    return shutil.copy(stored_once, tmp_path / "baselines" / "sweep.json")


def outcomes(verdicts) -> dict[str, str]:
    return {arm.arm: arm.outcome for arm in verdicts.arms}


def rewrite(path, change, arm=None) -> None:
    """Change stored entries (those of one arm, or all), and hash them and the file anew."""
    content = json.loads(path.read_text())
    for draw in content["draws"]:
        entries = draw["runs"]
        draw["runs"] = [sealed(each | change(each)) if arm in (None, each["arm"]) else each for each in entries]
    path.write_text(json.dumps(sealed(content)))


def test_the_same_numbers_pass_and_are_bitwise_equal(make_sweep, fake, stored):
    verdicts = gate(make_sweep(fake.three_arms()), stored)
    assert verdicts.exit_code == 0 and (verdicts.replicates, verdicts.margin) == ("seeds", 0.25)
    for arm in verdicts.arms:
        assert (arm.bitwise, arm.n, arm.verdict, arm.gap, arm.note) == (True, 3, "equivalent", 0.0, "bitwise equal")


def test_a_rise_is_a_regression_of_that_arm_only_and_passes_inside_the_margin(make_sweep, fake, stored):
    runs = make_sweep([*fake.three_arms()[:6], *(fake.Run(arm="nvfp4", seed=seed, gap=0.6) for seed in range(3))])
    verdicts = gate(runs, stored, margin=1)
    assert verdicts.exit_code == 1
    assert outcomes(verdicts) == {"bf16": "pass", "mxfp8": "pass", "nvfp4": "regression"}
    worse = verdicts.arms[2]
    assert worse.verdict == "worse" and 15 < worse.gap < 30 and 0 < worse.ci_low < worse.gap < worse.ci_high
    assert worse.note.endswith("worse than stored")
    inside = gate(runs, stored, margin="50%")
    assert (inside.exit_code, inside.arms[2].verdict) == (0, "worse")
    assert inside.arms[2].note.endswith("worse than stored, but inside the margin of 50 %")


def test_a_margin_in_tokens_is_the_gap_that_compare_makes_of_it(make_sweep, fake, stored):
    runs = make_sweep(fake.three_arms())
    margin = gate(runs, stored, margin="5%tokens").margin
    assert margin == pytest.approx(compare(runs, margin="5% tokens").margin_pct) and margin > 0.3


def test_a_fall_is_better_and_passes(make_sweep, fake, stored):
    runs = [*fake.three_arms()[:6], *(fake.Run(arm="nvfp4", seed=seed, gap=-0.5) for seed in range(3))]
    verdicts = gate(make_sweep(runs), stored)
    assert (verdicts.exit_code, verdicts.arms[2].verdict) == (0, "better")


@pytest.mark.parametrize(
    ("changes", "outcome", "code", "says"),
    [
        ({"state": "failed", "reason": "killed"}, "failed", 3, "seed 2 failed (killed)"),
        ({"state": "failed", "reason": "loss is nan at step 90"}, "regression", 1, "loss is nan at step 90"),
        ({"nan_from": 190}, "regression", 1, "seed 2 finished without a finite val_loss"),
        ({"state": "interrupted"}, "failed", 3, "seed 2 interrupted"),
    ],
)
def test_a_run_without_a_result(make_sweep, fake, stored, changes, outcome, code, says):
    runs = [*fake.three_arms()[:8], fake.Run(arm="nvfp4", seed=2, gap=0.03, **changes)]
    verdicts = gate(make_sweep(runs), stored)
    assert verdicts.exit_code == code and outcomes(verdicts)["nvfp4"] == outcome
    assert says in verdicts.arms[2].note


def test_missing_runs_and_arms_exit_3_and_new_arms_pass(make_sweep, fake, stored):
    verdicts = gate(make_sweep([*fake.three_arms()[:5], fake.Run(arm="mxfp6")]), stored)
    assert outcomes(verdicts) == {"bf16": "pass", "mxfp8": "missing", "mxfp6": "new", "nvfp4": "missing"}
    assert verdicts.exit_code == 3 and "seed 2 is not in this sweep" in verdicts.arms[1].note


@pytest.mark.parametrize("state", ["damaged", "missing", "foreign"])
def test_a_run_that_is_left_out_is_exit_3_though_all_stored_ones_pass(make_sweep, fake, stored, state):
    """A seed that the baseline lacks, whose numbers nobody sees."""
    *_, extra = runs = make_sweep([*fake.three_arms(), fake.Run(arm="nvfp4", seed=3, gap=0.03)])
    if state == "damaged":
        extra.jsonl("metrics").write_text("{")
    elif state == "missing":
        extra.config_path.unlink()
    else:
        shutil.copytree(extra.path, copy := extra.path.with_name("a-copy"))
        runs.append(type(extra)(copy))
    verdicts = gate(runs, stored)
    assert outcomes(verdicts) == dict.fromkeys(("bf16", "mxfp8", "nvfp4"), "pass")
    assert [entry.state for entry in verdicts.left_out] == [state]
    assert (verdicts.outcome, verdicts.exit_code) == ("failed", 3)
    assert [row["status"] for row in verdicts.rows()] == ["PASS", "PASS", "PASS", "FAIL"]


def test_another_machine_is_named_when_curves_differ(make_sweep, fake, stored):
    runs = make_sweep(fake.three_arms(threads=1))
    ids = {(run.manifest()["arm"], run.manifest()["seed"]): run.manifest()["run_id"] for run in runs}
    rewrite(stored, lambda entry: {"curve_sha256": "0", "run_id": ids[entry["arm"], entry["seed"]]})
    verdicts = gate(runs, stored)
    assert verdicts.exit_code == 0 and verdicts.outcome == "pass" and not verdicts.arms[0].bitwise
    assert verdicts.arms[0].note == "curves differ, and so does threads 2 -> 1; inside the margin of 0.25 %"


def test_the_formats_that_changed_under_an_arm_s_name_are_named_and_judged(make_sweep, fake, stored):
    changed = [fake.Run(arm="mxfp8", seed=seed, gap=0.9, fmt="mxfp4") for seed in range(3)]
    verdicts = gate(make_sweep([*fake.three_arms()[:3], *changed, *fake.three_arms()[6:]]), stored)
    arm = verdicts.arms[1]
    assert arm.recipe == "linear.input, linear.weight, linear.grad_output rowwise and columnwise mxfp8 -> mxfp4"
    assert arm.note == f"curves differ, and so does the recipe: {arm.recipe}; worse than stored"
    assert (arm.outcome, verdicts.exit_code, verdicts.arms[2].recipe) == ("regression", 1, "")


@pytest.mark.parametrize("content", [None, "", "[]", '{"version": 99}', '{"version": 2, "runs": [{"arm": "bf16"}]}'])
def test_no_usable_baseline_is_4(make_sweep, fake, tmp_path, content):
    path = tmp_path / "baseline.json"
    if content is not None:
        path.write_text(content)
    verdicts = gate(make_sweep(fake.three_arms()), path)
    assert verdicts.exit_code == 4 and str(path) in verdicts.problem and "hqsweep baseline update" in verdicts.problem


def test_a_loss_that_was_edited_in_the_file_is_no_baseline(make_sweep, fake, stored):
    content = json.loads(stored.read_text())
    content["draws"][0]["runs"][4]["final_loss"] = (9.0).hex()
    stored.write_text(json.dumps(content))
    verdicts = gate(make_sweep(fake.three_arms()), stored)
    assert verdicts.exit_code == 4 and "the entry of 'mxfp8', seed 1, contradicts its own hash" in verdicts.problem


EDITS = {
    "a recipe's format": lambda file: file["recipes"]["mxfp8"]["linear.weight"].update(rowwise="nvfp4"),
    "a recipe left out": lambda file: file["recipes"].pop("nvfp4"),
    "a recipe's GEMM mode": lambda file: file["recipes"]["bf16"].update(gemm="native"),
    "a run left out": lambda file: file["draws"][0]["runs"].pop(),
    "a draw twice": lambda file: file["draws"].append(file["draws"][0]),
    "another sweep": lambda file: file["draws"][0]["sweeps"].append("other"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_file_that_was_edited_beside_its_entries_is_no_baseline(edit, make_sweep, fake, stored):
    content = json.loads(stored.read_text())
    EDITS[edit](content)
    stored.write_text(json.dumps(content))
    verdicts = gate(make_sweep(fake.three_arms()), stored)
    assert verdicts.exit_code == 4 and "contradicts its own hash, so recipes were edited" in verdicts.problem


def test_a_file_of_an_earlier_version_has_no_hash_and_is_read(make_sweep, fake, stored):
    content = json.loads(stored.read_text())
    stored.write_text(json.dumps({key: value for key, value in content.items() if key != "sha256"}))
    assert gate(make_sweep(fake.three_arms()), stored).exit_code == 0


def test_no_common_arm_is_4(make_sweep, fake, stored):
    verdicts = gate(make_sweep([fake.Run(arm="other")]), stored)
    assert verdicts.exit_code == 4 and "bf16, mxfp8, nvfp4" in verdicts.problem
    assert verdicts.rows()[-1] == {"check": "gate", "case": "baseline", "status": "FAIL", "note": verdicts.problem}


def test_all_runs_of_a_known_arm_failed_is_3(make_sweep, fake, stored):
    assert gate(make_sweep([fake.Run(state="failed", reason="x")]), stored).exit_code == 3


def test_an_equal_machine_and_config_must_be_bitwise_equal(make_sweep, fake, stored):
    runs = make_sweep(fake.three_arms())
    rewrite(stored, lambda entry: {"curve_sha256": "0"} if entry["seed"] == 0 else {}, arm="bf16")
    verdicts = gate(runs, stored, margin=99)
    assert verdicts.exit_code == 1
    assert outcomes(verdicts) == {"bf16": "regression", "mxfp8": "pass", "nvfp4": "pass"}
    assert verdicts.arms[0].note.startswith("curves differ on an equal machine and config")


def test_what_the_seeds_cannot_decide_is_undecided_and_exits_4(make_sweep, fake, stored):
    noisy = [fake.Run(arm="nvfp4", seed=seed, gap=0.03 + 0.04 * (-1) ** seed) for seed in range(3)]
    verdicts = gate(make_sweep([*fake.three_arms()[:6], *noisy]), stored)
    last = verdicts.arms[-1]
    assert (verdicts.outcome, verdicts.exit_code, last.outcome) == ("undecided", 4, "undecided")
    assert last.ci_low < 0 < last.ci_high and last.needed > 3
    assert re.search(
        rf"about {last.needed - 3:.0f} more seeds \((\d+|less than a) (minute|hour)s? here\) would decide", last.note
    )
    assert [row["status"] for row in verdicts.rows()] == ["PASS", "PASS", "SKIP"]
    assert verdicts.rows()[-1]["note"].startswith("undecided: curves differ")


def test_one_seed_decides_nothing_unless_it_is_bitwise_equal(make_sweep, fake, tmp_path):
    path = tmp_path / "one.json"
    update(make_sweep([fake.Run(arm="nvfp4", gap=0.03)], "one"), path)
    verdicts = gate(make_sweep([fake.Run(arm="nvfp4", gap=5.0)], "two"), path)
    assert verdicts.exit_code == 4 and "more seeds would decide" in verdicts.arms[0].note
    assert verdicts.arms[0].gap > 50 and math.isnan(verdicts.arms[0].ci_high)
    assert gate(make_sweep([fake.Run(arm="nvfp4", gap=0.03)], "three"), path).exit_code == 0


def test_the_baseline_arm_s_own_loss_may_not_rise(make_sweep, fake, stored):
    shifted = [fake.Run(**vars(run) | {"gap": run.gap + 0.6}) for run in fake.three_arms()]
    verdicts = gate(make_sweep(shifted), stored)
    assert outcomes(verdicts)["bf16"] == "regression" and verdicts.arms[0].gap > 10


def test_a_sweep_may_equal_any_stored_draw(make_sweep, fake, stored):
    """And where it equals none, it is held against their mean."""
    ids = {key[:2]: entry["run_id"] for key, entry in read_baseline(stored).draws[0].items()}

    def elsewhere(name, shift, threads):
        runs = [fake.Run(**vars(run) | {"gap": run.gap + shift, "threads": threads}) for run in fake.three_arms()]
        dirs = make_sweep(runs, name)
        for run in dirs:
            run.update_manifest(run_id=ids[run.manifest()["arm"], run.manifest()["seed"]])
            fake.seal_again(run)
        return dirs

    assert update(elsewhere("second", 0.4, 1), stored, add=True).draws == 2
    assert all(arm.bitwise for arm in gate(elsewhere("again", 0.4, 1), stored).arms)
    assert all(arm.bitwise for arm in gate(make_sweep(fake.three_arms(), "first again"), stored).arms)
    between = gate(elsewhere("between", 0.2, 4), stored, margin=5)
    assert not between.arms[0].bitwise and abs(between.arms[0].gap) < 1


def test_rows_table_and_json(make_sweep, fake, stored):
    verdicts = gate(make_sweep(fake.three_arms()[:6]), stored)
    assert [(row["case"], row["status"]) for row in verdicts.rows()] == [
        ("bf16", "PASS"),
        ("mxfp8", "PASS"),
        ("nvfp4", "FAIL"),
    ]
    console = Console(width=120, record=True)
    console.print(verdicts.table())
    shown = console.export_text()
    assert "gate: failed, margin 0.25 %" in shown and "equivalent" in shown and "bitwise equal" in shown


@pytest.mark.parametrize("margin", [0, -1, 101, "x"])
def test_the_margin_is_a_part_of_the_loss(make_sweep, fake, stored, margin):
    with pytest.raises(UserError, match="margin: "):
        gate(make_sweep([fake.Run()]), stored, margin=margin)


GAPS = {"mxfp8": lambda seed, point: 0.002 + 1e-4 * seed, "nvfp4": lambda seed, point: 0.03, "null": lambda *_: 1e-4}


@pytest.fixture
def forks(make_sweep, fake, tmp_path):
    """A baseline file of a fork study: bf16, mxfp8, nvfp4 and the null arm, four trunks by two points."""
    path = tmp_path / "forks.json"
    assert not update(make_sweep(fake.fork_study(GAPS), "stored forks"), path).refused
    return path


def on_another_machine(make_sweep, fake, path, gaps, base):
    """The stored study again, by run ids, with trunks that went other ways: base(seed) nats, and other gaps."""
    runs = [fake.Run(**vars(run) | {"threads": 1, "base": base(run.seed)}) for run in fake.fork_study(GAPS | gaps)]
    dirs = make_sweep(runs, "elsewhere")
    ids = {key: entry["run_id"] for key, entry in read_baseline(path).draws[0].items()}
    for run in dirs:
        manifest = run.manifest()
        key = (manifest["arm"], manifest["seed"], manifest.get("point", 0))
        run.update_manifest(run_id=ids.get(key, manifest["run_id"]))
        fake.seal_again(run)
    return dirs


def test_forks_are_stored_by_their_decay_and_trunks_are_not(forks):
    entries = read_baseline(forks).draws[0]
    assert set(entries) == {(arm, s, p) for arm in ("bf16", *GAPS) for s in range(4) for p in (40, 80)}
    assert float.fromhex(entries["nvfp4", 0, 40]["decay_loss"]) == 2.03


def test_the_same_forks_are_bitwise_equal(make_sweep, fake, forks):
    verdicts = gate(make_sweep(fake.fork_study(GAPS)), forks)
    assert verdicts.exit_code == 0 and verdicts.replicates == "trunks"
    assert all(arm.bitwise and arm.n == 4 for arm in verdicts.arms) and len(verdicts.arms) == 4


def test_another_format_under_one_name_is_found_trunk_by_trunk(make_sweep, fake, forks):
    runs = fake.fork_study(GAPS | {"mxfp8": lambda seed, point: 0.012 + 1e-4 * seed})
    runs = [fake.Run(**vars(run) | {"fmt": "mxfp4"}) if run.arm == "mxfp8" else run for run in runs]
    verdicts = gate(make_sweep(runs), forks)
    assert outcomes(verdicts) == {"bf16": "pass", "mxfp8": "regression", "nvfp4": "pass", "null": "pass"}
    arm = verdicts.arms[1]
    assert (arm.verdict, arm.n) == ("worse", 4) and arm.gap == pytest.approx(0.5) and "mxfp8 -> mxfp4" in arm.note


def test_a_study_of_another_machine_passes_where_gaps_held_though_trunks_moved(make_sweep, fake, forks):
    held = {
        "mxfp8": lambda seed, point: 0.0021 + 2e-4 * (seed == point),
        "nvfp4": lambda seed, point: 0.0301 + 1e-4 * seed,
    }
    verdicts = gate(on_another_machine(make_sweep, fake, forks, held, lambda seed: 2 + 0.05 * (seed - 1.5)), forks)
    assert verdicts.exit_code == 0 and {arm.outcome for arm in verdicts.arms} == {"pass"}
    assert [arm.verdict for arm in verdicts.arms] == ["undecided", "equivalent", "equivalent", "equivalent"]
    assert "threads 2 -> 1; its own loss is not judged by the margin; a rise up to" in verdicts.arms[0].note


def test_trunks_that_all_got_worse_are_a_regression_of_the_baseline_arm(make_sweep, fake, forks):
    verdicts = gate(on_another_machine(make_sweep, fake, forks, {}, lambda seed: 2.2 + 0.01 * seed), forks)
    assert outcomes(verdicts)["bf16"] == "regression" and verdicts.exit_code == 1
    assert outcomes(verdicts)["mxfp8"] == "pass"


def test_of_forks_that_end_together_the_gap_of_a_whole_run_is_held_against_the_stored_one(make_sweep, fake, tmp_path):
    """Forks at 40 and 80 of 120 steps: where the gap grows by 0.5 % for each step of age more, that is 60 % at 120."""
    path = tmp_path / "together.json"
    update(make_sweep(fake.fork_study(GAPS, end=120), "stored forks"), path)
    grown = GAPS | {"nvfp4": lambda seed, point: 0.03 + 0.01 * (120 - point) + 1e-4 * seed}
    verdicts = gate(make_sweep(fake.fork_study(grown, end=120)), path)
    assert outcomes(verdicts)["nvfp4"] == "regression" and verdicts.end == 120
    assert verdicts.arms[2].gap == pytest.approx(60, rel=0.01)
    assert "margin 0.25 %, gaps of whole runs of 120 steps" in gate_markdown(verdicts)
    assert gate(make_sweep(fake.fork_study(GAPS), "other"), path).end is None


def test_two_trunks_decide_nothing(make_sweep, fake, tmp_path):
    path = tmp_path / "two.json"
    update(make_sweep(fake.fork_study(GAPS, trunks=2), "stored forks"), path)
    verdicts = gate(make_sweep(fake.fork_study(GAPS | {"nvfp4": lambda s, p: 0.9 + 0.01 * s}, trunks=2)), path)
    assert outcomes(verdicts)["nvfp4"] == "undecided" and verdicts.exit_code == 4
    assert "more trunk" in verdicts.arms[2].note


def test_whole_runs_and_forks_are_not_judged_together(make_sweep, fake, forks):
    with pytest.raises(UserError, match="whole runs and forks among them"):
        gate(make_sweep([*fake.fork_study(GAPS), fake.Run()]), forks)


def test_runs_of_one_arm_with_two_recipes_in_one_sweep_are_refused(make_sweep, fake, forks):
    """They lie so in the folder of a sweep that was run again after its recipe had changed."""
    runs = fake.fork_study(GAPS)
    changed = [fake.Run(**vars(run) | {"fmt": "mxfp4"}) for run in runs if run.arm == "mxfp8"]
    with pytest.raises(UserError, match=r"sweep 'sweep' has runs of 'mxfp8', seed 0 at step 40, with several configs"):
        gate(make_sweep([*runs, *changed]), forks)


SWEEP = {"replicates": "seeds", "margin": 0.25}


def test_heading_table_and_problem():
    bad = Verdict(arm="a|<b>", outcome="regression", verdict="worse", gap=0.5, margin=0.25, n=3, note="bad")
    page = gate_markdown(Verdicts(arms=(bad,), **SWEEP))
    assert page.startswith("### hqsweep gate: ❌ regression, margin 0.25 %\n\n| arm | gate | verdict | change % |")
    assert "| a\\|&lt;b&gt; | regression | worse | +0.500 | - | - | 3 | bad |" in page
    good = Verdict(arm="a", outcome="pass", verdict="equivalent", margin=0.25)
    assert "✅ pass" in gate_markdown(Verdicts(arms=(good,), **SWEEP)) and "| equivalent |" in gate_markdown(
        Verdicts(arms=(good,), **SWEEP)
    )
    open_arm = Verdict(arm="a", outcome="undecided", verdict="undecided", margin=0.25)
    assert "⚠️ undecided" in gate_markdown(Verdicts(arms=(open_arm,), **SWEEP))
    assert "❌ no baseline, margin 0.25 %\n\nno file x.json\n" in gate_markdown(
        Verdicts(problem="no file x.json", **SWEEP)
    )


def test_steps_of_a_job_share_the_file(tmp_path):
    for text in ("one\n", "two\n"):
        append(tmp_path / "new" / "summary.md", text)
    assert (tmp_path / "new" / "summary.md").read_text() == "one\ntwo\n"
