"""What each rank does in tests of trainings in stages."""

from hashlib import sha256
from pathlib import Path

import torch
from cases import DELAYED_IN_PARTS, LINEARS
from support.parallel.checkpointed import content
from support.parallel.training_ranks import config, trainer

from hqsweep.checkpoints.sharded_save import save_sharded
from hqsweep.config.train import ONE_RANK, StatsConfig
from hqsweep.jobs.training_report import saved_fields, trainer_fields
from hqsweep.train.checkpoint import go_on_from, save_checkpoint

BREAK = 1
"""The step behind which there is a checkpoint."""
BASE = {"steps": 2, "batch": 4, "microbatches": 4, "eval_batches": 1}
NVFP4 = LINEARS["nvfp4"]
DELAYED = DELAYED_IN_PARTS
RECIPE = {
    "linear": "mxfp8",
    "overrides": [{"layers": "last(1)", "linear": "bf16"}],
    "schedule": [{"at": 2, "linear": "nvfp4", "overrides": [{"layers": "last(1)", "linear": "fp8_current"}]}],
}
"""Which changes after two steps, and counts layers."""
FOUR = {"layers": 4}
CASES = {
    "recipe that changes": (RECIPE, {"clip": 0.01, "steps": 3}),
    "stochastic, interleaved, recomputed": (NVFP4, {"model": FOUR, "recompute": "layer", "stages": 2}),
    "held, delayed": (DELAYED, {"model": {"quantized_weights": True}, "steps": 3}),
    "experts": ("mxfp8", {"model": FOUR | {"experts": 4, "first_moe_layer": 1}, "stages": 2}),
}


TIED = "tied"
"""Whose gradients of embedding and head are added in another order than in one process."""


FACTS = ("recipe that changes", "experts")
DELAYED_LAYERS = {"linear": DELAYED, "overrides": [{"layers": "last(1)", "linear": "nvfp4"}]}
MATRICES = {"parallel": {"tp": 2}, "clip": 0.01}
CUT_EXPERTS = {"ffn": 128, "experts": 4, "expert_ffn": 128, "first_moe_layer": 2}
EXPERTS = {"parallel": {"dp_shard": 2, "ep": 2}, "clip": 0.01}
BESIDE = {
    "matrices": (NVFP4, MATRICES | {"model": FOUR | CUT_EXPERTS, "recompute": "layer", "stages": 2}),
    "held matrices": (DELAYED_LAYERS, MATRICES | {"model": {"ffn": 128, "quantized_weights": True}}),
    "tied matrices": ("mxfp8", MATRICES | {"model": {"ffn": 128, "tied": True}}),
    "experts over ranks": (DELAYED_LAYERS, EXPERTS | {"model": {"experts": 4, "first_moe_layer": 1}}),
    "held experts": (
        NVFP4,
        EXPERTS | {"model": FOUR | {"experts": 4, "quantized_weights": True}, "stages": 2, "recompute": "layer"},
    ),
}
"""Over two ranks of other axes, and over two stages of such ranks, of which one may have no experts."""
ON_FOUR = [name for name in BESIDE if name != "tied matrices"]
"""Those whose sums have one order with stages and without."""
RESUMED = ("held matrices", "experts over ranks")


def beside(name: str, pp: int):
    """The config of a case of BESIDE, without stages (pp=1) or with some."""
    recipe, changes = BESIDE[name]
    changes = BASE | {"microbatches": 2} | changes
    stages, dims = changes.pop("stages", 1), changes.pop("parallel")
    parallel = dims | ({"pp": pp, "stages_per_rank": stages} if pp > 1 else {})
    return config(recipe, **changes, parallel=parallel, stats={"capture_at": 2})


def staged(name: str, pp: int = 2, **dims):
    """The config of a case over stages, or with pp=1 in one process."""
    recipe, changes = ("mxfp8", {"model": {"tied": True}}) if name == TIED else CASES[name]
    changes = BASE | changes
    stages = changes.pop("stages", 1)
    if pp > 1:
        changes["parallel"] = {"pp": pp, "stages_per_rank": stages, **dims}
    return config(recipe, **changes, stats={"capture_at": changes["steps"]})


def trained(cfg, folder: Path) -> tuple:
    """(metrics, statistics and operands, weights and moments) of a training, which leaves a checkpoint after BREAK
    steps, of the same layout from one process as from many."""
    run, metrics, stats = trainer(cfg), [], []
    for done in run.steps():
        metrics.append(done.metrics)
        stats += map(str, done.stats)
        stats += (f"{name} {sha256(bytes_of(x)).hexdigest()}" for name, x in done.captured.items())
        if done.step == BREAK and run.ranks.size == 1:
            save_sharded(run.model, run.optimizer, folder / f"step_{BREAK}", run.position())
        elif done.step == BREAK:
            save_checkpoint(run, folder)
    return metrics, stats, content(run)


def bytes_of(x: torch.Tensor) -> bytes:
    return x.view(torch.uint8).cpu().numpy().tobytes()


def facts_of(run) -> dict:
    """What the manifest says of all layers. A collective."""
    known = {
        name: fact for name, fact in trainer_fields(run).items() if name in ("params", "gemm_plan", "recipe_schedule")
    }
    return known | {"saved": saved_fields(run)["input_bytes_per_element"]}


def resumed(cfg, folder: Path) -> tuple:
    """(metrics, weights and moments) of a training that goes on from there, without statistics."""
    run = trainer(cfg.model_copy(update={"stats": StatsConfig(every=0)}))
    go_on_from(run, folder / f"step_{BREAK}")
    return [done.metrics for done in run.steps()], content(run)


def loaded(cfg, folder: Path) -> dict:
    """Weights and moments that one process reads there, whatever ranks the config says."""
    run = trainer(cfg.model_copy(update={"train": cfg.train.model_copy(update={"parallel": ONE_RANK})}))
    go_on_from(run, folder / f"step_{BREAK}")
    return content(run)


def train_all(rank: int, folder: Path) -> dict:
    """Case -> what is trained, and what goes on from its checkpoint and from that of one process."""
    results = {}
    for name in CASES:
        cfg, own = staged(name), folder / name
        results[name] = trained(cfg, own), resumed(cfg, own), resumed(cfg, folder / "one" / name)
    results["facts"] = {name: facts_of(trainer(staged(name))) for name in FACTS}
    tied, own = staged(TIED), folder / TIED
    return results | {TIED: (trained(tied, own), resumed(tied, own))}


def train_beside(rank: int, folder: Path, pp: int) -> dict:
    """Case -> what is trained beside other axes; with stages also what goes on from their checkpoint."""
    results = {}
    for name in BESIDE:
        cfg, own = beside(name, pp), folder / f"{name} {pp}"
        results[name] = trained(cfg, own), resumed(cfg, own) if pp > 1 and name in RESUMED else None
    return results


def assert_same(parts, whole):
    """Weights and moments of both ranks together are those of one process, and no rank has another's."""
    assert parts[0].keys() | parts[1].keys() == whole.keys()
    assert not parts[0].keys() & parts[1].keys()
    for key, value in (parts[0] | parts[1]).items():
        assert torch.equal(value, whole[key]), key
