"""Names of runs and metrics are read as people read them."""

import pytest

from hqsweep.errors import UserError
from hqsweep.foreign_logs.values import arm_and_seed, find, lower_is_better


@pytest.mark.parametrize(
    ("run", "read"),
    [
        ("bf16-s0", ("bf16", "0")),
        ("nvfp4_seed1", ("nvfp4", "1")),
        ("seed=01/nvfp4", ("nvfp4", "1")),
        ("bf16/seed_2/eval", ("bf16/eval", "2")),
        ("muon Seed:12", ("muon", "12")),
        ("adam", None),
        ("mxfp4_floor", None),
        ("has10", None),
        ("s0", None),
    ],
)
def test_the_seed_in_the_name_of_a_run(run, read):
    assert arm_and_seed(run) == read


def test_the_better_direction_by_a_metrics_name():
    assert all(map(lower_is_better, ("val_loss", "eval/perplexity", "bpb", "train error")))
    assert not any(map(lower_is_better, ("val_acc", "eval/accuracy", "reward", "F1")))
    for name in ("x", "loss_score"):
        with pytest.raises(UserError, match="does not say which direction is better"):
            lower_is_better(name)


def found(*names: str, asked: dict | None = None, metric: str | None = None):
    return find(dict.fromkeys(names, True), "log", asked or {}, metric, open_ended=False)


def test_the_first_usual_name_counts_in_any_case():
    columns = found("Run", "Recipe", "SEED", "_step", "val_loss", "train_loss")
    assert (columns.arm, columns.seed, columns.step, columns.metric) == ("Recipe", "SEED", "_step", "val_loss")
    assert found("arm", "seed", "acc").metric == "acc"
    forked = found("arm", "seed", "trunk", "point", "acc")
    assert forked.keys == {"arm": "arm", "replicate": "trunk", "draw": "point"}


def test_what_is_missing_is_said_with_what_is_there():
    with pytest.raises(UserError, match="log: no column of arms"):
        found("seed", "loss")
    with pytest.raises(UserError, match="'a', 'b'; give one with --metric"):
        found("arm", "seed", "a", "b")
    with pytest.raises(UserError, match=r"no column of the metric 'los' \(did you mean 'loss'\?\); it has 'arm'"):
        found("arm", "seed", "loss", metric="los")
    with pytest.raises(UserError, match="'seed' is the column of the seed, and no metric"):
        found("arm", "seed", "loss", metric="seed")
    with pytest.raises(UserError, match="and 3 more"):
        found(*map(str, range(15)))
