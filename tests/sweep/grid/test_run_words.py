"""The words of a command as a grid: what is wrong with a key is told before torch is imported."""

import subprocess
import sys

import pytest

from hqsweep.config.job import ConvergenceConfig, config_class, parse
from hqsweep.config.keys import Job, Training, check_keys
from hqsweep.errors import UserError
from hqsweep.sweep.grid.run_words import read

QUIET = ("conf=convergence", "track=none")


def refusal(*words: str) -> str:
    with pytest.raises(UserError) as raised:
        read([*QUIET, *words])
    return str(raised.value)


@pytest.mark.slow
def test_a_grid_is_read_and_its_keys_are_checked_without_torch():
    code = (
        "import sys\n"
        "from hqsweep.sweep.grid.run_words import read\n"
        "given = read(['conf=quickstart', 'track=none'], workers=3)\n"
        "heavy = {'torch', 'numpy', 'pandas', 'pyarrow', 'wandb'} & set(sys.modules)\n"
        "sys.exit(f'{heavy}' if heavy or len(given.grid.points) < 24 else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_faults_are_those_of_the_typed_config():
    assert refusal("train.stepz=3") == "train.stepz: no such key (did you mean 'train.steps'?)"
    assert "linear: no such key (did you mean 'recipe.linear'?)" in refusal("+linear=mxfp8")
    assert refusal("train.lr=fast,1e-3").startswith("train.lr: got 'fast'; must be a number")
    assert refusal("train.lr=1e-3,fast").endswith("(in the run with train.lr=fast)")
    assert "data.path" in refusal("data.source=text")


def test_what_a_recipe_means_is_not_asked_here():
    config = read([*QUIET, "recipe.linear=nvfp4+sr+4over6"]).grid.points[0].config
    check_keys(config)
    with pytest.raises(UserError, match="4over6 cannot be combined with sr"):
        parse(config)


def test_a_training_has_the_keys_of_its_typed_config_in_their_order():
    assert list(Training.model_fields) == list(ConvergenceConfig.model_fields)
    assert issubclass(config_class("parity"), Job)


def test_another_jobs_keys_are_left_to_its_typed_config():
    check_keys({"job": "parity", "whatever": 1})
