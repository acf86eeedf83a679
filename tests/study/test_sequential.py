"""Studies that grow until they are decided: which runs are started, when they end, and what is refused."""

import json

import pytest

from hqsweep.errors import UserError
from hqsweep.sweep.store.store import RunStore

GROW = ("recipe=bf16,mxfp8,nvfp4", "null_arm=true", "seeds.until=decided", "seeds.max=8", "margin=1%")


def seeds(batch: list[str], arm: str) -> list[int]:
    return [int(name.rpartition("-s")[2]) for name in batch if name.rpartition("-s")[0] == arm]


@pytest.mark.slow
def test_seeds_are_added_until_every_arm_has_a_verdict(laboratory):
    laboratory.gaps = {"mxfp8": (0.0, 1e-4), "nvfp4": (0.1, 0.02), "null": (0.0, 1e-4)}
    growth = laboratory.grow(*GROW, "seed=0,1")
    last = growth.looks[-1]
    assert last.verdicts == {"mxfp8": "equivalent", "nvfp4": "worse", "null": "equivalent"} and last.decided
    assert [look.replicates for look in growth.looks] == list(range(2, last.replicates + 1))
    assert [look.added for look in growth.looks] == [*range(2, last.replicates), None]
    assert seeds(laboratory.batches[0], "mxfp8") == seeds(laboratory.batches[0], "null") == [0, 1]
    assert laboratory.batches[1:] == [
        [f"{arm}-s{look.added}" for arm in ("bf16", "mxfp8", "nvfp4", "null")] for look in growth.looks[:-1]
    ]
    assert len(growth.runs) == 4 * last.replicates and not growth.failed
    assert laboratory.said == [look.line for look in growth.looks]
    assert laboratory.said[0].startswith("look 2 of at most 8: mxfp8 ")
    assert laboratory.said[0].endswith("; adding seed 2")
    assert laboratory.said[-1].endswith("every arm has a verdict")


def test_the_budget_ends_a_study_that_stays_undecided(laboratory):
    laboratory.gaps = {"mxfp8": (0.02, 0.1)}
    growth = laboratory.grow("recipe=bf16,mxfp8", "seeds.until=decided", "seeds.max=4", "seed=3")
    assert [look.replicates for look in growth.looks] == [2, 3, 4]
    assert growth.looks[-1].verdicts == {"mxfp8": "undecided"} and growth.looks[-1].added is None
    assert laboratory.said[-1] == "look 4 of at most 4: mxfp8 undecided; no more than 4 were stated"
    assert [seeds(batch, "mxfp8") for batch in laboratory.batches] == [[3, 4], [5], [6]]


@pytest.mark.slow
def test_the_same_command_goes_on_and_repeats_nothing(laboratory):
    words = (*GROW, "seeds.max=6", "seed=0,1")
    laboratory.gaps = {"mxfp8": (0.0, 1e-4), "nvfp4": (0.02, 0.1), "null": (0.0, 1e-4)}
    laboratory.failing = {"nvfp4-s4"}
    growth = laboratory.grow(*words)
    assert [run.name.rpartition("-")[0] for run in growth.failed] == ["nvfp4-s4"]
    assert laboratory.said[-1].startswith("1 of 20 runs failed, so no more seeds are added: nvfp4-s4-")
    done = laboratory.done() - {"nvfp4-s4"}
    laboratory.batches, laboratory.failing = [], set()
    growth = laboratory.grow(*words)
    assert laboratory.batches[0] == ["nvfp4-s4"] and growth.looks[0].replicates == 5
    assert growth.looks[-1].replicates == 6
    assert not laboratory.done() & done
    laboratory.batches = []
    assert laboratory.grow(*words).looks == growth.looks[-1:]
    assert laboratory.batches == [[]]
    stored = json.loads((laboratory.folder / "runs/convergence/sweep.json").read_text())
    assert stored["study"]["seeds"] == {"until": "decided", "max": 6} and "seed=0,1" in stored["overrides"]


@pytest.mark.slow
def test_a_study_whose_time_is_over_ends_with_what_is_there_and_the_same_command_goes_on(laboratory):
    laboratory.gaps, laboratory.late = {"mxfp8": (0.02, 0.1), "nvfp4": (0.02, 0.1)}, {"nvfp4-s3", "null-s3"}
    growth = laboratory.grow(*GROW, "seed=0,1,2,3")
    assert not growth.failed and not growth.looks and "failed" not in "".join(laboratory.said)
    arms = growth.comparison.arms.set_index("arm")
    assert arms.loc[["mxfp8", "nvfp4"], "n"].tolist() == [4, 0] and arms.at["nvfp4", "verdict"] == "waiting"
    laboratory.batches, laboratory.late = [], set()
    assert laboratory.grow(*GROW, "seed=0,1,2,3").looks[0].replicates == 4
    assert sorted(laboratory.batches[0]) == ["null-s3", "nvfp4-s3"]


@pytest.mark.slow
def test_a_verdict_once_reached_stays_on_the_way(laboratory):
    """What an earlier look decided is not taken back, though the arm goes on with the others."""
    laboratory.gaps = {"mxfp8": (0.1, 1e-3), "nvfp4": (0.01, 0.1)}
    looks = laboratory.grow("recipe=bf16,mxfp8,nvfp4", "seeds.until=decided", "seeds.max=5", "seed=0,1").looks
    verdicts = [look.verdicts["mxfp8"] for look in looks]
    assert verdicts[-1] == "worse" and verdicts == sorted(verdicts, key=["undecided", "worse"].index)


def test_a_diverged_arm_leaves_and_the_others_go_on(laboratory):
    laboratory.gaps = {"mxfp8": (0.02, 0.1)}
    laboratory.diverging = {"nvfp4-s1"}
    words = ("recipe=bf16,mxfp8,nvfp4", "seeds.until=decided", "seeds.max=3", "seed=0,1")
    growth = laboratory.grow(*words)
    assert [look.verdicts["nvfp4"] for look in growth.looks] == ["diverged", "diverged"]
    assert [look.replicates for look in growth.looks] == [2, 3] and not growth.failed
    assert laboratory.batches[1] == ["bf16-s2", "mxfp8-s2"]


@pytest.mark.slow
def test_force_repeats_what_is_finished_once(laboratory):
    laboratory.gaps = {"mxfp8": (0.02, 0.1)}
    words = ("recipe=bf16,mxfp8", "seeds.until=decided", "seeds.max=3", "seed=0,1")
    laboratory.grow(*words)
    laboratory.batches = []
    laboratory.grow(*words, force=True)
    assert laboratory.batches == [[f"{arm}-s{seed}" for arm in ("bf16", "mxfp8") for seed in range(3)]]


@pytest.mark.slow
def test_seeds_of_another_config_in_the_sweep_are_not_counted(laboratory):
    laboratory.gaps = {"mxfp8": (0.5, 1e-4)}
    words = ("recipe=bf16,mxfp8", "seeds.until=decided", "seeds.max=4")
    laboratory.grow(*words, "train.lr=0.5", "seed=range(4)")
    laboratory.batches = []
    growth = laboratory.grow(*words, "seed=0,1")
    assert growth.looks[0].replicates == 2


WRONG = [
    (("fork.at=40", "seeds.max=2"), "seeds.max: 2; a verdict on forks needs 3 trunks at least"),
    (("seeds.max=3", "seed=range(4)"), r"seeds.max: 3, but 4 replicates are given or there already \(seeds 0, 1, 2, 3"),
    (("recipe=bf16",), "seeds.until: decided, but the grid has one arm"),
    (("engine=slurm", "engine.slurm.detach=true"), "engine.slurm.detach: true, but seeds.until=decided adds seeds"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_what_cannot_grow_is_refused_before_anything_starts(laboratory, words, message):
    by_key = {"recipe": "recipe=bf16,mxfp8", "seeds.until": "seeds.until=decided"}
    by_key |= {word.partition("=")[0]: word for word in words}
    with pytest.raises(UserError, match=message):
        laboratory.grow(*by_key.values())
    assert not laboratory.batches and not (laboratory.folder / "runs").exists()


@pytest.mark.slow
def test_fewer_seeds_than_are_there_are_refused(laboratory):
    laboratory.gaps = {"mxfp8": (0.02, 0.1)}
    words = ("recipe=bf16,mxfp8", "seeds.until=decided")
    laboratory.grow(*words, "seeds.max=4", "seed=0,1")
    laboratory.batches = []
    with pytest.raises(UserError, match=r"seeds.max: 3, but 4 replicates are given or there already"):
        laboratory.grow(*words, "seeds.max=3", "seed=0,1")
    assert not laboratory.batches
    assert len(RunStore(laboratory.folder / "runs").runs("convergence")) == 8


FORKS = ("fork.at=40,80", "fork.steps=10", "fork.decay=10", "fork.warmup=5", "train.log_every=10")


@pytest.mark.slow
def test_a_fork_study_begins_with_three_trunks_and_grows_by_trunks(laboratory):
    laboratory.gaps = {"mxfp8": (0.0, 1e-4), "nvfp4": (0.1, 0.03), "null": (0.0, 1e-5)}
    growth = laboratory.grow(*GROW, *FORKS, "seed=0")
    assert growth.looks[0].replicates == 3 and growth.looks[-1].verdicts["mxfp8"] == "equivalent"
    assert seeds(laboratory.batches[0], "trunk") == [0, 1, 2]
    assert laboratory.batches[1] == [
        "trunk-s3",
        *(f"{arm}-s3-at{at}" for arm in ("bf16", "mxfp8", "nvfp4", "null") for at in (40, 80)),
    ]
    assert "trunk" not in growth.looks[0].verdicts


@pytest.mark.slow
def test_a_trunk_that_is_given_cannot_grow(laboratory):
    laboratory.grow("recipe=bf16,mxfp8", "seeds.until=decided", "seeds.max=3", *FORKS, "seed=0,1,2")
    trunk = next(run for run in RunStore(laboratory.folder / "runs").runs("convergence") if run.name[:5] == "trunk")
    trunk.checkpoint.mkdir()
    (trunk.checkpoint / "step_40.pt").write_bytes(b"state")
    trunk.update_manifest(data_hash=None)
    trunk.write_status(state="finished")
    words = ("recipe=bf16,mxfp8", "seeds.until=decided", f"fork.trunk={trunk.path}", "fork.at=40", "sweep=mine")
    with pytest.raises(UserError, match=r"seeds.until: decided adds trunks, but fork.trunk names the only one"):
        laboratory.grow(*words)


SETTLE = ("recipe=bf16,mxfp8,nvfp4", "null_arm=true", "fork.at=40,80", "fork.end=100", "fork.decay=10", "fork.warmup=5",
          "train.log_every=10", "train.steps=80", "fork.until=settled", "margin=1%", "seed=0")  # fmt: skip
A_TRUNK = 80 + 4 * (60 + 20)
"""The steps of a trunk of SETTLE with its forks."""


@pytest.mark.slow
def test_trunks_are_added_until_every_gap_is_known_to_the_margin(laboratory):
    laboratory.gaps = {"mxfp8": (0.0, 1e-3), "nvfp4": (0.1, 0.003), "null": (0.0, 1e-4)}
    growth = laboratory.grow(*SETTLE, f"fork.max_steps={8 * A_TRUNK + 1}")
    first, last = growth.looks[0], growth.looks[-1]
    assert (first.replicates, first.maximum, first.added) == (3, 8, 3) and not first.decided
    assert last.decided and 3 < last.replicates < 8 and last.verdicts["nvfp4"] == "worse"
    assert max(last.half_pct.values()) <= last.margin_pct == 1 < max(growth.looks[-2].half_pct.values())
    assert set(last.half_pct) == {"mxfp8", "nvfp4", "null"}
    assert "nvfp4 worse (± " in last.line and last.line.endswith("; margin 1 %; every gap is known to the margin")
    row = growth.comparison.arms.set_index("arm").loc["nvfp4"]
    assert row["maximum"] == 8 and row["half_pct"] == last.half_pct["nvfp4"]


@pytest.mark.slow
def test_the_steps_end_a_study_that_does_not_settle(laboratory):
    laboratory.gaps = {"mxfp8": (0.0, 0.05), "nvfp4": (0.1, 0.05)}
    growth = laboratory.grow(*SETTLE, f"fork.max_steps={5 * A_TRUNK - 1}")
    assert [look.replicates for look in growth.looks] == [3, 4]
    assert growth.looks[-1].line.endswith("; margin 1 %; no more than 4 were stated")
    with pytest.raises(
        UserError, match=rf"fork.max_steps: {6 * A_TRUNK}, but 'convergence' began to run with fork.max"
    ):
        laboratory.grow(*SETTLE, f"fork.max_steps={6 * A_TRUNK}")
    with pytest.raises(UserError, match=r"fork.until: fixed, but 'convergence' began to run with fork.until=settled"):
        laboratory.grow(*(word for word in SETTLE if "until" not in word), "seed=0,1")
