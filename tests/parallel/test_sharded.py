"""Checkpoints of trainings over ranks: what was saved on N is what M go on from, to the byte."""

import pytest
from support.parallel.sharded_training import RESHARDED, RESUMED, Training, assert_same, killed, reshard, resumed
from support.ranks import run_ranks
from torch.multiprocessing import ProcessExitedException

from hqsweep.checkpoints.weights import save_model


@pytest.mark.feature("H13")
@pytest.mark.slow
def test_a_resumed_training_is_the_one_without_a_break(tmp_path):
    run_ranks(2, resumed, tmp_path, RESUMED)
    assert sorted(path.name for path in (tmp_path / "mxfp8_bf16").iterdir())[0] == ".metadata"
    assert not list(tmp_path.glob("*.partial"))
    save_model(Training("mxfp8", None, kind="held").model, tmp_path / "one")
    whole, one = (tmp_path / name / "model.safetensors" for name in ("whole", "one"))
    assert whole.read_bytes() == one.read_bytes()


@pytest.mark.feature("H13")
@pytest.mark.slow
def test_any_number_of_ranks_loads_what_any_other_saved(tmp_path):
    ones = {}
    for recipe, kind in RESHARDED:
        ones[f"{recipe}_{kind}"] = one = Training(recipe, None, kind=kind)
        one.train(0 if "codes" in kind else 3)
        one.save(tmp_path / f"{recipe}_{kind}_one")
    contents = run_ranks(4, reshard, tmp_path)[0]
    for recipe, kind in RESHARDED:
        name = f"{recipe}_{kind}"
        assert_same(contents[f"{name}_one on four"], ones[name].content(), name)
        back = Training(recipe, None, seed=5, kind=kind).load(tmp_path / f"{name}_four")
        for other in (contents[f"{name} on four"], contents[f"{name} on two"], back.content()):
            assert_same(contents[f"{name} saved"], other, name)


@pytest.mark.feature("H13")
def test_a_rank_that_is_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path):
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_ranks(2, killed, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2.partial"]
    training = Training("mxfp8", None, kind="held").load(tmp_path / "step-1")
    assert training.step == 1
    training.save(tmp_path / "step-2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]
