"""The mesh: which rank has which part of the batch, and sizes that do not multiply."""

import os

import pytest
import torch
from support.ranks import run_ranks

from hqsweep.config.train import ParallelConfig
from hqsweep.errors import UserError
from hqsweep.parallel.mesh import Ranks, build_mesh, check_devices, join
from hqsweep.parallel.wire.collectives import Disagreement, agree
from hqsweep.parallel.wire.spawn import stand_apart

CPU = torch.device("cpu")


def _ranks(rank: int, cases: list[dict[str, int]]) -> list[tuple]:
    places = []
    for case in cases:
        dims = ParallelConfig(**case)
        ranks = Ranks(dims=dims, mesh=build_mesh(dims, "cpu"), device=torch.device("cpu"))
        places.append((ranks.rank, ranks.data_rank, ranks.fsdp_mesh.shape, ranks.gather(rank), ranks.first(rank)))
        experts = ranks.expert_mesh
        assert experts["ep"].size() == dims.ep and experts["efsdp"].size() == dims.dp_shard // dims.ep
        assert ranks.rank % dims.tp == experts.get_local_rank("tp")
    with pytest.raises(UserError, match=r"the process group gives 4 ranks, but .* dp_shard=3.* is 3"):
        build_mesh(ParallelConfig(dp_shard=3), "cpu")
    return places


def test_axes():
    cases = [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 2, "dp_shard": 2}, {"pp": 2, "tp": 2},
             {"dp_shard": 4, "ep": 2}]  # fmt: skip
    data_ranks = [(0, 1, 2, 3), (0, 1, 2, 3), (0, 0, 1, 1), (0, 0, 0, 0), (0, 1, 2, 3)]
    shapes = [(4,), (2, 2), (2,), (1,), (4,)]
    for rank, places in enumerate(run_ranks(4, _ranks, cases)):
        expected = [(rank, data[rank], shape, [0, 1, 2, 3], 0) for data, shape in zip(data_ranks, shapes, strict=True)]
        assert places == expected


def _disagree(rank: int) -> list[str]:
    dims = ParallelConfig(dp_shard=4)
    build_mesh(dims, "cpu")
    agree({"recipe": {"linear": "mxfp8"}, "seed": 0})
    said = []
    for settings in ({"recipe": 1, "seed": int(rank == 2)}, {"recipe": 1, "data": "ab" if rank else "cd"}):
        with pytest.raises(Disagreement) as refused:
            agree(settings)
        said.append(str(refused.value))
    return said


def test_ranks_that_disagree_say_in_what_with_one_sentence():
    said = run_ranks(4, _disagree)
    assert all(each == said[0] for each in said)
    assert said[0][0].startswith(
        "train.parallel: the ranks disagree in seed: rank 2 has 6b86b273ff, the others 5feceb66ff"
    )
    assert "the ranks disagree in data: rank 0 has" in said[0][1]


def test_gpus_and_nccl_are_looked_for_before_anything_starts(monkeypatch):
    dims = ParallelConfig(dp_shard=2)
    check_devices(ParallelConfig(), "cuda")
    check_devices(dims, "cpu")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(UserError, match=r"train.parallel: this torch is built without NCCL"):
        check_devices(dims, "cuda")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"dp_shard=2 .* asks for 2 GPUs, .* this machine has 1; .*gpus_per_run=1 to"):
        check_devices(dims, "cuda")
    check_devices(dims, "cuda", gpus_per_run=1)
    with pytest.raises(UserError, match=r"engine.gpus_per_run: 2, but this machine has 1 GPUs"):
        check_devices(dims, "cuda", gpus_per_run=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(UserError, match=r"this machine has 3; .*engine.gpus_per_run=2 to try"):
        check_devices(ParallelConfig(dp_shard=4), "cuda")


def test_ranks_of_one_gpu_are_of_several_machines_to_nccl(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    stand_apart(0)
    assert "NCCL_HOSTID" not in os.environ
    monkeypatch.setenv("NCCL_HOSTID", "rack")
    stand_apart(1)
    assert os.environ["NCCL_HOSTID"] == "rack/1"


def test_one_process_alone_is_no_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match=r"asks for 2 ranks, and this is one process; `hqsweep run` starts them"):
        join(ParallelConfig(dp_shard=2), CPU)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"the launcher gives 4 ranks, but .* is 2"):
        join(ParallelConfig(dp_shard=2), CPU)


def test_a_rank_alone_exchanges_nothing_and_copies_nothing():
    ranks, x, unused = join(ParallelConfig(), CPU), torch.arange(3.0), lambda: 1 / 0
    state = {"model": {"weight": x}, "optimizer": {}, "step": 1}
    assert not torch.distributed.is_initialized()
    assert (ranks.rank, ranks.size, ranks.data_rank, ranks.data_size, ranks.is_first) == (0, 1, 0, 1, True)
    assert ranks.gather(x) == [x]
    assert ranks.gather_to_first(x) == [x]
    assert ranks.first(x) is x
    assert ranks.in_order(x).shape == (1, 3)
    assert ranks.in_order(x).data_ptr() == x.data_ptr()
    assert ranks.whole(state) is state
    assert ranks.parts_of(state, None, None) == state
    assert ranks.whole_model(("own", "optimizer"), unused) == ("own", "optimizer")
    ranks.agree(unused)
    ranks.barrier()
    ranks.largest(x)
    assert x.tolist() == [0, 1, 2]
