"""The sections that say how a model is trained: ranks."""

import pytest

from hqsweep.config.engine import gpus_asked
from hqsweep.config.keys import Training
from hqsweep.config.train import ParallelConfig
from hqsweep.errors import UserError
from hqsweep.sweep.store.names import ONE_RANK

RECIPE = {"name": "bf16", "gemm": "exact", "schedule": []}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"train": {"parallel": {"dp_shard": 3}}}, r"train.batch: 16 sequences do not divide into 3 ranks"),
        ({"train": {"parallel": {"dp_shard": 4}, "microbatches": 8}}, r"into 4 ranks .* of 8 microbatches; .* of 32"),
        ({"train": {"parallel": {"tp": 3}}}, r"train.parallel.tp: 3 does not divide the model's heads \(4\)"),
        ({"train": {"parallel": {"tp": 4}}, "model": {"ffn": 90}}, r"tp: 4 does not divide the MLP's width \(90\)"),
        (
            {"train": {"parallel": {"tp": 4}}, "model": {"experts": 4, "expert_ffn": 90}},
            r"tp: 4 does not divide an expert's width \(90\)",
        ),
        ({"train": {"parallel": {"ep": 2, "dp_shard": 2}}, "model": {"experts": 3}}, r"ep: 2 does not .*experts \(3\)"),
        ({"train": {"parallel": {"ep": 2, "dp_shard": 2}}}, r"train.parallel.ep: 2, but model.experts is 0"),
        ({"train": {"parallel": {"ep": 2}}, "model": {"experts": 4}}, r"ep: 2 does not divide dp_shard \(1\)"),
        ({"train": {"parallel": {"pp": 4}, "microbatches": 4}}, r"train.parallel: pp=4 is 4 stages of 2 model.layers"),
        (
            {"train": {"parallel": {"pp": 2, "stages_per_rank": 2}, "microbatches": 2}},
            r"pp=2 \* stages_per_rank=2 is 4 stages of 2 model.layers",
        ),
        (
            {"train": {"parallel": {"expert_room": 2}}},
            r"expert_room: 2.0 for experts that ranks share out, but ep is 1",
        ),
        ({"train": {"parallel": {"stages_per_rank": 2}}}, r"stages_per_rank: 2 stages of each rank of pp, but pp is 1"),
        ({"train": {"parallel": {"pp": 2}}}, r"train.microbatches: 1 for the stages of train.parallel.pp=2"),
        (
            {"train": {"parallel": {"pp": 2, "stages_per_rank": 2}, "microbatches": 3, "batch": 12}},
            r"train.microbatches: 3 do not divide into rounds of train.parallel.pp=2",
        ),
        (
            {"train": {"parallel": {"pp": 2, "tp": 3}, "microbatches": 2}},
            r"train.parallel.tp: 3 does not divide the model's heads \(4\)",
        ),
        (
            {"train": {"parallel": {"pp": 2, "dp_shard": 2, "ep": 2}, "microbatches": 2}, "model": {"experts": 3}},
            r"train.parallel.ep: 2 does not divide model.experts \(3\)",
        ),
        (
            {"train": {"parallel": {"pp": 2, "dp_shard": 2, "ep": 2}}, "model": {"experts": 4}},
            r"train.microbatches: 1 for the stages of train.parallel.pp=2",
        ),
        (
            {
                "train": {"parallel": {"tp": 2, "dp_shard": 3}, "batch": 6},
                "model": {"experts": 5, "dim": 64, "heads": 2},
            },
            r"dp_shard: 3 does not divide model.experts \(5\), and the 3 ranks .* model.dim \(64\); give a",
        ),
        ({"train": {"parallel": {"tp": 2}, "context": 33}}, r"tp: 2 does not divide train.context \(33\)"),
        (
            {"train": {"parallel": {"dp_shard": 2, "ep": 2}, "compile": "graph"}, "model": {"experts": 4}},
            r"train.parallel.ep: experts over ranks, .* is graph; give train.parallel.expert_room=2, or auto",
        ),
        (
            {"train": {"parallel": {"pp": 2}, "microbatches": 2, "offload": True}},
            r"train.parallel.pp: several stages, but train.offload is true",
        ),
        (
            {"train": {"parallel": {"dp_shard": 2}}, "engine": {"gpus_per_run": 4}},
            r"engine.gpus_per_run: 4 GPUs do not share out a machine's ranks, of which there are 2 \(.*dp_shard=2",
        ),
        ({"engine": {"gpus_per_run": 2}}, r"engine.gpus_per_run: 2 GPUs .* of which there are 1"),
        (
            {"train": {"parallel": {"dp_shard": 4}}, "engine": {"kind": "slurm", "slurm": {"gres": "gpu:h200:2"}}},
            r"engine.slurm.gres: 'gpu:h200:2' for 4 ranks on each machine .* give gpu:4, or engine.gpus_per_run=2",
        ),
        (
            {"train": {"parallel": {"dp_shard": 2}}, "engine": {"runs_per_gpu": 2}},
            r"engine.runs_per_gpu: 2, but a run of several ranks .* give null",
        ),
        (
            {"train": {"parallel": {"dp_shard": 2}}, "engine": {"kind": "slurm", "slurm": {"nodes": 3}}},
            r"engine.slurm.nodes: 3 machines do not share out the 2 ranks",
        ),
        ({"train": {"parallel": {"dp_shard": 0}}}, r"greater than or equal to 1"),
        ({"train": {"parallel": {"cp": 2}}}, r"Extra inputs"),
    ],
)
def test_what_does_not_divide_is_refused(config, why):
    with pytest.raises(ValueError, match=why):
        Training.model_validate({"job": "convergence", "sweep": "s", "recipe": RECIPE, **config})


def test_world():
    dims = ParallelConfig(pp=2, dp_replicate=3, dp_shard=4, tp=5, ep=2)
    assert (dims.world, dims.data) == (120, 12)
    dims.check_world(120, "engine.gpus_per_run")
    with pytest.raises(UserError, match=r"engine.gpus_per_run gives 8 ranks, but pp=2 \* .* is 120; change one"):
        dims.check_world(8, "engine.gpus_per_run")


def test_one_rank_is_what_run_ids_leave_out():
    assert ParallelConfig().model_dump() == ONE_RANK | {"expert_room": None}


@pytest.mark.parametrize(
    "engine",
    [
        {"gpus_per_run": 2},
        {"kind": "slurm", "gpus_per_run": 1, "slurm": {"nodes": 2, "gres": "gpu"}},
        {"kind": "slurm", "slurm": {"gres": "gpu:4"}},
        {"kind": "slurm", "slurm": {"gres": "shard:1"}},
    ],
)
def test_ranks_may_share_gpus(engine):
    train = {"parallel": {"dp_shard": 4}}
    Training.model_validate({"job": "convergence", "sweep": "s", "recipe": RECIPE, "train": train, "engine": engine})


@pytest.mark.parametrize(
    ("gres", "count"),
    [("gpu", 1), ("gpu:3", 3), ("gpu:a100", 1), ("gpu:a100:2", 2), ("gpu:2,nvme:1", None), ("", None)],
)
def test_the_gpus_that_slurm_is_asked_for(gres, count):
    assert gpus_asked(gres) == count
