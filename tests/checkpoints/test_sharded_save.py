"""save_sharded and load_sharded in one process: what is on the disk when, who reads it, and what is refused.

Saves in the background fail in processes whose files may be 1 MiB. tests/parallel/test_sharded.py has several ranks.
"""

import errno
import subprocess
import sys
import warnings
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.parallel.sharded_training import Training, assert_same
from torch import nn

from hqsweep import load_checkpoint
from hqsweep.checkpoints.sharded_load import load_sharded
from hqsweep.checkpoints.sharded_save import disk_fault, save_sharded, save_sharded_async, words_of
from hqsweep.checkpoints.sharded_state import whole_of
from hqsweep.errors import UserError
from hqsweep.optim import FusedAdam
from hqsweep.parallel.shards.shard import buffer_cuts
from hqsweep.quant import HybridQuantizedTensor, HybridQuantizer


def trained(kind="bf16", steps=2):
    training = Training("mxfp8", None, kind=kind)
    training.train(steps)
    return training


def test_a_save_that_is_killed_leaves_the_one_before(tmp_path, monkeypatch):
    one = trained()
    one.save(tmp_path / "step-2")
    before = one.content()
    one.train(1)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(dcp.FileSystemWriter, "finish", killed)
        one.save(tmp_path / "step-3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3.partial"]
    with pytest.raises(UserError, match="half a checkpoint"):
        load_sharded(one.model, one.optimizer, tmp_path / "step-3.partial")
    assert_same(Training("mxfp8", None, kind="bf16").load(tmp_path / "step-2").content(), before)
    one.save(tmp_path / "step-3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]


def test_what_is_saved_beside_a_training_is_what_was_there_at_the_call(tmp_path):
    one = trained("held")
    before = one.content()
    saving = save_sharded_async(one.model, one.optimizer, tmp_path / "a", {"step": 2, "sum": torch.tensor(0.1)})
    one.train(1)
    assert saving.result() == tmp_path / "a"
    other = Training("mxfp8", None, kind="held")
    assert load_sharded(other.model, other.optimizer, tmp_path / "a") == {"step": 2, "sum": torch.tensor(0.1)}
    assert_same(other.content(), before)


def test_torch_and_load_checkpoint_read_the_masters_by_the_names_of_the_plain_model(tmp_path):
    one = trained()
    one.save(tmp_path / "step-2")
    masters = {name: one.optimizer.master_param(p) for name, p in one.model.named_parameters()}
    state = {name: torch.zeros_like(master) for name, master in masters.items()}
    state["optimizer"] = {"state.0.weight.exp_avg": torch.zeros(64, 32)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "step-2", no_dist=True)
    moments = one.optimizer.state[one.model[0].weight]
    assert torch.equal(state.pop("optimizer")["state.0.weight.exp_avg"], moments["exp_avg"])
    assert_same(state, masters)
    other = Training("mxfp8", None, kind="bf16", seed=3)
    loaded = load_checkpoint(tmp_path / "step-2", other.model, other.optimizer)
    assert (loaded.step, loaded.moments) == (2, len(masters))
    for name, p in other.model.named_parameters():
        assert torch.equal(p, dict(one.model.named_parameters())[name]), name
        assert torch.equal(other.optimizer.state[p]["master_param"], masters[name])


@pytest.mark.feature("H13")
def test_a_folder_of_torchtitan_gives_weights_and_moments(tmp_path):
    """Its layout: weights at the top, optimizer.state.NAME.exp_avg, and pickles beside, of which none is read."""
    one = trained("fp32")
    names = {p: name for name, p in one.model.named_parameters()}
    state = dict(one.model.state_dict()) | {"train_state": {"step": 2}, "lr_scheduler": {"last_epoch": 2}}
    state["optimizer"] = {
        f"state.{names[p]}.{key}": value for p, values in one.optimizer.state.items() for key, value in values.items()
    } | {f"param_groups.{name}.lr": 1e-3 for name in names.values()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "step-2", no_dist=True)
    other = Training("mxfp8", None, seed=3)
    assert load_sharded(other.model, other.optimizer, tmp_path / "step-2") == {}
    own, theirs = other.content(), one.content()
    assert own.pop("lr") != theirs.pop("lr")
    assert_same(own, theirs)


class Wider(Training):
    def __init__(self) -> None:
        super().__init__("mxfp8", None, kind="fp32")
        self.model[2] = nn.Linear(64, 32)


def damaged(folder, how):
    if how == "no metadata":
        (folder / ".metadata").unlink()
    elif how == "no data":
        (folder / "__0_0.distcp").unlink()
    elif how == "no folder":
        folder.rename(folder.with_name("b"))
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no metadata", "half a checkpoint"),
        ("no data", "1 of its 1 files are not there"),
        ("no folder", "a' is not there; give a folder of torch.distributed.checkpoint"),
        ("other model", r"it lacks 1 of the 7 tensors of the model: 2\.bias"),
        ("there already", "'.*a' is there already"),
        ("strange extra", r"extra\.what is a set; it takes numbers, texts"),
        ("strange key", "extra has the key 3"),
        ("one name", r"two tensors are extra\.a\.b, one by a key with a dot in it"),
        ("strange module", "the model has a module 'optimizer'"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_written(tmp_path, how, message):
    one = trained("fp32")
    folder, before = one.save(tmp_path / "a"), one.content()
    extras = {"strange extra": {"what": {1}}, "strange key": {3: 4}}
    extras["one name"] = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    with pytest.raises(UserError, match=message):
        if how in extras:
            save_sharded(one.model, one.optimizer, tmp_path / "c", extras[how])
        elif how == "there already":
            one.save(folder)
        elif how == "strange module":
            strange = nn.ModuleDict({"optimizer": nn.Linear(2, 2)})
            save_sharded(strange, FusedAdam(strange.parameters()), tmp_path / "c")
        elif how == "other model":
            other = Wider()
            load_sharded(other.model, other.optimizer, folder)
        else:
            load_sharded(one.model, one.optimizer, damaged(folder, how))
    assert_same(one.content(), before)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(("named", "other"), [({"dim": 1}, {"dim": 0}), ({"axis": 1}, {})])
def test_codes_of_columns_are_those_of_the_whole(named, other):
    """Also of a checkpoint that names the axis of the matrix, as older ones do; as codes of rows they are refused."""
    whole = HybridQuantizedTensor.quantize(torch.randn(32, 96), HybridQuantizer.parse("mxfp8|nvfp4"))
    parts, cuts = whole.split(48, 1), buffer_cuts(whole.sharding.cut, 2)
    planes = {
        name: torch.cat([cut.pack(part.buffers[name], rank) for rank, part in enumerate(parts)])
        for name, cut in cuts.items()
    }
    described = {"metadata": whole.metadata.describe(), "kind": type(whole).__name__, "shape": [32, 96], "each": 48}
    described["ranks"] = 2
    back = whole_of(described | named, planes, torch.device("cpu"))
    assert all(
        torch.equal(buffer.view(torch.uint8), whole.buffers[n].view(torch.uint8)) for n, buffer in back.buffers.items()
    )
    with pytest.raises(UserError, match="has another size than its format says"):
        whole_of(described | other, planes, torch.device("cpu"))


FORKS = """
import os, resource, sys, torch, torch.distributed.checkpoint, hqsweep as hq
m = torch.nn.Linear(1024, 1024)
o = torch.optim.AdamW(m.parameters())
m(torch.randn(2, 1024)).sum().backward()
o.step()
for folder, program in eval(sys.argv[1]).items():
    if os.fork() == 0:
        os.chdir(folder)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(f"../{folder}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        exec(program)
        break
    _, status = os.wait()
    print(os.waitstatus_to_exitcode(status), flush=True)
"""
"""Each program is the rest of a fork of one process, as imports take seconds."""
PROGRAM = """_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
def refused(call):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error)
limit(1 << 20)
saving = hq.save_sharded_async(m, o, "last")
"""
WHY = "a file is larger than the file system or `ulimit -f` allows"
SAID = f"save_sharded_async: 'last' was not saved: {WHY}"


ENDS = {
    "ends": "import atexit; atexit.register(print, 'called')",
    "exits": "import atexit; atexit.register(print, 'called')\nraise SystemExit(3)",
    "asks": """
refused(saving.result)
refused(lambda: hq.save_sharded(m, o, "whole"))
saving = hq.save_sharded_async(m, o, "last")
while not saving.done():
    pass
limit(hard)
refused(lambda: hq.save_sharded(m, o, "next"))
print(*os.listdir())
hq.save_sharded_async(m, o, "next").result()
hq.save_sharded_async(m, o, "more")
""",
}


class Ended(NamedTuple):
    """How a program ended."""

    code: int
    stdout: str
    stderr: str
    saved: list[str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Name -> how that program of ENDS ended."""
    folder = tmp_path_factory.mktemp("ends")
    for name in ENDS:
        (folder / name).mkdir()
    programs = {name: PROGRAM + end for name, end in ENDS.items()}
    run = subprocess.run([sys.executable, "-c", FORKS, repr(programs)], cwd=folder, capture_output=True, text=True)
    said = [[(folder / f"{name}.{kind}").read_text() for kind in ("stdout", "stderr")] for name in ENDS]
    saved = [sorted(path.name for path in (folder / name).iterdir()) for name in ENDS]
    return dict(zip(ENDS, map(Ended, map(int, run.stdout.split()), *zip(*said, strict=True), saved), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ends", "exits"])
def test_a_failure_that_nobody_asked_for_is_said_at_the_end(name, ended):
    assert ended[name] == Ended(120, "called\n", f"hqsweep: {SAID}\n", [])


@pytest.mark.slow
def test_result_raises_the_reason_and_the_next_save_what_nobody_asked_for(ended):
    refused = [f"OSError [Errno {errno.EFBIG}] {WHY}: '{name}'" for name in ("last", "whole")]
    said = [*refused, f"RuntimeError {SAID}", ""]
    assert ended["asks"] == Ended(0, "\n".join([*said, ""]), "", ["more", "next"])


def test_what_the_disk_refuses_is_told_in_plain_words(tmp_path, monkeypatch):
    assert disk_fault(tmp_path / "none") is None and disk_fault(tmp_path) is None
    (tmp_path / "0.distcp").symlink_to("/dev/full")
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("builtins.open", lambda *_: (_ for _ in ()).throw(full))
    assert words_of(disk_fault(tmp_path)) == "the disk is full"
    assert words_of(ValueError("a\nb")) == "ValueError: a b"
