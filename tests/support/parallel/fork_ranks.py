"""What each rank does in tests of fork studies over several ranks, and one process in their place."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hqsweep.config.job import parse
from hqsweep.errors import UserError
from hqsweep.jobs import convergence
from hqsweep.jobs.sink import ListSink
from hqsweep.parallel.mesh import Ranks, build_mesh
from hqsweep.train.loop import Trainer

AT, STEPS, DECAY = 3, 2, 1
GPT = {"dim": 32, "layers": 1, "heads": 2}


def config(linear="bf16", *, parallel=None, trunk="trunk", noise=0.0, at=AT, quantized=False, fork=None, **model):
    """A fork; with trunk=None a trunk. It has two microbatches, each of a rank of its own or not. Nothing is clipped,
    as the norm of gradients is summed by parts."""
    points, own = at if isinstance(at, list) else [at], parallel or {}
    over = {"microbatches": 1 if {"dp_shard", "dp_replicate"} & own.keys() else 2, "parallel": own}
    return parse(
        {
            "job": "convergence", "sweep": "t", "seed": 1, "recipe": {"name": "r", "linear": linear},
            "model": model if "kind" in model else GPT | {"quantized_weights": quantized} | model,
            "data": {"source": "markov", "markov": {"length": 20000}}, "stats": {"every": 0},
            "train": {"steps": max(points) if trunk is None else at + STEPS + DECAY, "batch": 4, "context": 32,
                      "eval_batches": 1, "eval_every": 4, "log_every": 1, "checkpoint_every": 2, "device": "cpu",
                      "lr": 1e-2, "clip": 100.0, **over},
            "fork": {"at": points, "steps": STEPS, "decay": DECAY, "warmup": 2, "trunk": trunk, "noise": noise,
                     **(fork or {})},
        }
    )  # fmt: skip


def joined(dims, device_type) -> Ranks:
    """The process group that is there."""
    return Ranks(dims=dims, mesh=build_mesh(dims, device_type), device=torch.device(device_type))


def run(cfg, folder: Path, sink: ListSink | None = None) -> ListSink:
    """A whole run of the job, on the ranks that its config says."""
    convergence.join = joined
    sink = sink or ListSink()
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    convergence.run(cfg, sink, folder)
    return sink


def rows(sink: ListSink) -> list[dict]:
    """Its metrics but for the norm of the gradients, a sum over more parts where ranks are many."""
    return [row for row in sink.metrics if row["metric"] != "grad_norm"]


class Killed(Exception):
    pass


def killed_at(stop: int, cfg, folder: Path) -> ListSink:
    """A run that ends before the step after `stop`, and then goes on."""
    real, sink = Trainer._advance, ListSink()

    def advance(self):
        if self.step == stop:
            raise Killed
        return real(self)

    Trainer._advance = advance
    try:
        run(cfg, folder, sink)
    except Killed:
        pass
    finally:
        Trainer._advance = real
    return run(cfg, folder, sink)


def study(folder: Path, case: dict, parallel: dict | None) -> list[list[dict]]:
    """The rows of a trunk and of a fork of it."""
    shared = {key: value for key, value in case.items() if key not in ("of_trunk", "of_fork", "killed")}
    trunk, sinks = case.get("of_trunk", {}) | {"trunk": None}, []
    for options, name, stop in ((trunk, "trunk", 2), (case.get("of_fork", {}), "fork", AT + STEPS)):
        cfg, own = config(parallel=parallel, **(shared | options)), folder / name
        sinks.append(killed_at(stop, cfg, own) if "killed" in case else run(cfg, own))
    assert len(sinks[1].facts["trunk_sha256"]) == 64
    return [rows(sink) for sink in sinks]


def studies(rank: int, folder: Path, cases: list[tuple[dict, dict]]) -> list:
    """study() of each case with its ranks."""
    return [study(folder / str(index), case, parallel) for index, (case, parallel) in enumerate(cases)]


def ranked(rank: int, folder: Path, cases: list[tuple[dict, dict]], source: dict) -> dict:
    """All that is done on two ranks."""
    results = {"studies": studies(rank, folder, cases)}
    two = {"dp_shard": 2}
    # a fork of what one process wrote, and trunks from another program's checkpoint and back to points it had passed
    results["from a file"] = rows(run(config(parallel=two, **source["fork"]), folder / "from_file"))
    results["source"] = rows(run(config(parallel=two, trunk=None, fork=source["source"]), folder / "source"))
    for points in ([4], [2, 4]):
        run(config(parallel=two, trunk=None, at=points), folder / "more")
    with pytest.raises(UserError) as refused:
        run(config(parallel={"pp": 2}, **source["fork"]), folder / "stages")
    return results | {"refused": str(refused.value)}
