"""The baseline file: exact losses, what they depend on, and entries that a hash covers."""

import json

import pytest

from hqsweep.errors import UserError
from hqsweep.report.gate.baseline import loss_of, read_baseline, sealed
from hqsweep.report.gate.baseline_update import update

pytestmark = pytest.mark.slow


@pytest.fixture
def stored(make_sweep, fake, tmp_path):
    """A baseline file of three arms by three seeds."""
    path = tmp_path / "baselines" / "sweep.json"
    update(make_sweep(fake.three_arms(), "stored"), path)
    return path


def edit(path, **values):
    """Change values of the first entry, and leave its hash as it is."""
    content = json.loads(path.read_text())
    content["draws"][0]["runs"][0] |= values
    path.write_text(json.dumps(content))


def test_losses_are_hex_floats_beside_what_they_depend_on(stored):
    entry = json.loads(stored.read_text())["draws"][0]["runs"][0]
    assert float.fromhex(entry["final_loss"]).hex() == entry["final_loss"]
    assert (entry["point"], entry["decay_loss"], loss_of(entry)) == (0, None, float.fromhex(entry["final_loss"]))
    assert entry["fingerprint"] == {
        "device": "cpu", "threads": "2", "isa": "avx2", "versions.torch": "2.13.0+cpu",
        "kernel_build": "-O3 -ffp-contract=off", "data_hash": "9f" * 8,
    }  # fmt: skip


def test_every_arm_is_stored_tensor_by_tensor(stored):
    recipes = read_baseline(stored).recipes
    assert list(recipes) == ["bf16", "mxfp8", "nvfp4"]
    assert recipes["nvfp4"]["linear.weight"] == {
        "rowwise": "nvfp4", "columnwise": "nvfp4", "columnwise_source": "original",
    }  # fmt: skip
    assert recipes["nvfp4"]["gemm"] == "exact"


@pytest.mark.parametrize(
    "change", [{"final_loss": (2.0).hex()}, {"curve_sha256": "0" * 64}, {"run_id": "0"}, {"fingerprint": {}}]
)
def test_an_entry_that_was_edited_is_refused(stored, change):
    edit(stored, **change)
    with pytest.raises(UserError, match=r"sweep.json: the entry of 'bf16', seed 0, contradicts its own hash"):
        read_baseline(stored)


def test_the_hash_is_that_of_everything_else_in_the_entry(stored):
    entry = json.loads(stored.read_text())["draws"][0]["runs"][0]
    assert sealed(entry) == entry and sealed(entry | {"final_loss": (2.0).hex()})["sha256"] != entry["sha256"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not a baseline file (JSONDecodeError"),
        ("[]", "not a baseline file (TypeError"),
        ("[" * 100_000, "not a baseline file (ValueError: it is nested more than 100 deep)"),
        ('{"version": 2, "draws": [], "recipes": ' + '{"a":' * 900 + "1" + "}" * 901, "nested more than 100 deep"),
        ('{"version": 1, "runs": []}', "a baseline of version 1, and this hqsweep reads version 2"),
        ('{"version": 2, "recipes": {}, "draws": [{"runs": [{"arm": "bf16"}]}]}', "not a baseline file (KeyError"),
        ('{"version": 2, "recipes": {}, "draws": {"a": 1}}', "not a baseline file"),
    ],
)
def test_another_file_is_refused_and_says_what_it_is(tmp_path, content, says):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(UserError) as refused:
        read_baseline(path)
    assert says in str(refused.value) and "hqsweep baseline update" in str(refused.value)
