"""A training step over the GPUs of one machine: our Trainer under fully_shard beside the same GPT of compiled torch.

    python -m benchmarks.ranks [--size M L] [--recipes bf16 mxfp8 mxfp8:held ...] [--ranks 2] [--tp] [--ep] [--quick]
                               [--deterministic on off]

Every rank takes the tokens of benchmarks/step.py's size, on one GPU as on many (weak scaling). Plain torch is as
torchtitan does it: each block compiled, then fully_shard, gathered in bfloat16, gradients reduced in float32, fused
AdamW. Ours is train.parallel.dp_shard=RANKS. ":held": weights held quantized (model.quantized_weights), whose codes and
scales travel, by direction; without it weights travel in high precision and are quantized after. Ours runs as a run
does, with deterministic kernels only; "off" beside it has torch choose, as it does for the plain model.

--quick is for a try of the command: a tiny shape, beside torch's model as it is, whose case is "torch eager" then.

wire    gigabytes a second that a rank receives: all_gather and reduce_scatter of 256 MiB
time    a step: milliseconds of rank 0, host included, medians of turns beside compiled torch; share of its tokens a
        second; memory at its peak, and what ranks share beside it (p2p_copy); scaling: milliseconds of the same case
        on one rank over its own
sharded with one rank: the same beside compiled torch, ours under fully_shard too; so all of a step over ranks but what
        travels, on one GPU
tp      with --tp: matrices shared out by tensor and sequence parallelism (tp=RANKS), on the tokens of one rank:
        scaling is milliseconds on one rank over RANKS times its own. The MLP's width is rounded up to whole blocks on
        each rank (L: 5,504 of 5,472)
ep      with --ep: the experts of the size moe over the ranks, each with that size's tokens: "waits", where the host
        waits in each layer for the numbers of rows, and "room", where all that can come have room; scaling as in `time`
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks import rows
from benchmarks.plain_gpt import PlainGPT, plain_step
from benchmarks.step import Data, Prepared, alternated
from benchmarks.step_cases import SIZES, training
from benchmarks.step_floors import Size
from hqsweep.config.job import ConvergenceConfig
from hqsweep.config.model import ModelConfig, ffn_width
from hqsweep.config.train import ParallelConfig, TrainConfig
from hqsweep.parallel.fsdp_exchanges import GATHERS, SUMS
from hqsweep.parallel.mesh import Ranks, backend, build_mesh
from hqsweep.parallel.shared import expert_room
from hqsweep.parallel.wire import collectives, p2p_copy
from hqsweep.parallel.wire.spawn import spawn_ranks
from hqsweep.train.loop import Step, Trainer

SECTIONS = ("wire", "time", "sharded", "tp", "ep")
RECIPES = ("bf16", "mxfp8", "mxfp8:held", "nvfp4:held")
GOALS = {"mxfp8:held": 1.0}
"""Recipe -> the share of compiled torch's tokens a second that is wanted."""
SCALING_GOALS = {"time": 0.93, "tp": 0.85}
QUICK = Size(model=ModelConfig(dim=64, layers=2, heads=2), batch=2, context=32, vocabulary=96, turn=1)
MOE_QUICK = replace(QUICK, model=ModelConfig(dim=64, layers=2, heads=2, experts=4))
PURPOSES = {"tp": (p2p_copy.ROWS,), "ep": (GATHERS, SUMS, expert_room.ROWS)}
"""Section -> what ranks share memory for; of the others weights and gradients."""
WIRE_BYTES = 1 << 28
COLUMNS = (
    "section", "device", "size", "case", "recipe", "deterministic", "ranks", "ms", "share", "goal", "scaling",
    "scaling_goal", "pass", "ktokens_s", "tflops", "peak_gb", "shared_gb", "first_step_s", "gather_gbs", "reduce_gbs",
)  # fmt: skip


class ShardedGPT(PlainGPT):
    """PlainGPT whose blocks and loss are compiled one by one, around the gathers of fully_shard."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x, _ = block(x, self.cos, self.sin)
        return _loss(self.norm(x), self.head.weight, targets)


@torch.compile
def _loss(h: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(h.to(weight.dtype), weight)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def plain(size: Size, data: Data, device: str) -> Callable[[], Tensor]:
    """A step of compiled torch under fully_shard."""
    torch.manual_seed(0)
    model = ShardedGPT(size.model, size.vocabulary, size.context).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return plain_step(model, data, TrainConfig(), compiled=False)


class Ours:
    """A step of our Trainer on these ranks; one rank is sharded only on demand."""

    def __init__(
        self, size: Size, data: Data, recipe: str, dims: ParallelConfig, device: str, sharded: bool = False
    ) -> None:
        config = configured(size, recipe, dims, device)
        here = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
        ranks = None
        if dims.world > 1 or sharded:
            ranks = Ranks(dims=dims, mesh=build_mesh(dims, device), device=here)
        self.trainer = Trainer(config, data, config.recipe.build(), here, ranks)
        self.steps = self.trainer.steps()

    def __call__(self) -> Step:
        return next(self.steps)


def configured(size: Size, recipe: str, dims: ParallelConfig, device: str) -> ConvergenceConfig:
    """The config of our Trainer, with a batch for all data parallel ranks together."""
    name, held = recipe.removesuffix(":held"), recipe.endswith(":held")
    whole = replace(
        size,
        batch=size.batch * dims.data,
        model=size.model.model_copy(update={"quantized_weights": held}),
    )
    config = training(whole, name, "auto", device)
    return config.model_copy(update={"train": config.train.model_copy(update={"parallel": dims})})


class Bench:
    """The cases of one number of ranks, in each of its processes; rank 0 writes rows."""

    def __init__(self, args: argparse.Namespace, alone: dict[tuple, float]) -> None:
        self.args, self.alone, self.world = args, alone, dist.get_world_size()
        self.writer = rows.Writer("ranks", args.device, args) if dist.get_rank() == 0 else None
        self.milliseconds: dict[tuple, float] = {}
        """Case -> its milliseconds."""

    def add(self, named: rows.Row, measure: Callable[[], rows.Row]) -> None:
        """Add a row of what every rank measures; one rank's error is that of all, as collectives would hang."""
        row = measure()
        if self.writer:
            self.writer.add(named | row)

    def run(self) -> None:
        """Run all sections."""
        if self.world > 1 and "wire" in self.args.only:
            self.add({"section": "wire", "ranks": self.world}, self._wire)
        for name, size in self.args.sizes.items():
            for section in ("time", "sharded") if self.world == 1 else ("time",):
                if section in self.args.only:
                    self._time(name, size, section)
            if self.args.tp and "tp" in self.args.only:
                self._tensor_parallel(name, divisible(size, self.args.ranks))
        if self.args.ep and "ep" in self.args.only:
            self._expert_parallel("quick" if self.args.quick else "moe")

    def _time(self, name: str, size: Size, section: str) -> None:
        data = Data(replace(size, batch=size.batch * self.world), self.args.device)
        own = Data(size, self.args.device)
        reference = Prepared(partial(plain, size, own, self.args.device), self.args.device, is_deterministic=False)
        seconds = alternated([reference], size.turn, self.args.turns)[0]
        row = partial(self._row, size, reference, seconds, None, "", section)
        self.add(self._named(section, name, "torch eager" if self.args.quick else "torch compiled"), row)
        dims = ParallelConfig(dp_shard=self.world)
        for recipe, kernels in product(self.args.recipes, self.args.deterministic):
            build = partial(Ours, size, data, recipe, dims, self.args.device, section == "sharded")
            case = Prepared(build, self.args.device, is_deterministic=kernels == "on")
            seconds, beside = alternated([case, reference], size.turn, self.args.turns)
            row = partial(self._row, size, case, seconds, beside, recipe, section, kernels)
            self.add(self._named(section, name, "hqsweep") | {"recipe": recipe, "deterministic": kernels}, row)
            del case

    def _tensor_parallel(self, name: str, size: Size) -> None:
        data, dims = Data(size, self.args.device), ParallelConfig(tp=self.world)
        for recipe in (entry for entry in self.args.recipes if not entry.endswith(":held")):
            if self.world == 1 and (*_key(size, recipe), "on") in self.milliseconds:  # from its section time
                continue
            build = partial(Ours, size, data, recipe, dims, self.args.device)
            case = Prepared(build, self.args.device, is_deterministic=True)
            [seconds] = alternated([case], size.turn, self.args.turns)
            row = partial(self._row, size, case, seconds, None, recipe, section="tp")
            self.add(self._named("tp", name, "hqsweep") | {"recipe": recipe, "deterministic": "on"}, row)
            del case

    def _expert_parallel(self, name: str) -> None:
        size = MOE_QUICK if self.args.quick else SIZES[name]
        data = Data(replace(size, batch=size.batch * self.world), self.args.device)
        rooms = {"hqsweep": None} if self.world == 1 else {"waits": None, "room": float(self.world)}
        for recipe, (case_name, room) in product(self.args.recipes, rooms.items()):
            dims = ParallelConfig(dp_shard=self.world, ep=self.world, expert_room=room)
            case = Prepared(
                partial(Ours, size, data, recipe, dims, self.args.device), self.args.device, is_deterministic=True
            )
            [seconds] = alternated([case], size.turn, self.args.turns)
            row = partial(self._row, size, case, seconds, None, recipe, section="ep")
            self.add(self._named("ep", name, case_name) | {"recipe": recipe, "deterministic": "on"}, row)
            del case

    def _named(self, section: str, size: str, case: str) -> rows.Row:
        return {"section": section, "size": size, "case": case, "ranks": self.world}

    def _row(
        self,
        size: Size,
        case: Prepared,
        seconds: float,
        beside: float | None,
        recipe: str,
        section: str = "time",
        kernels: str = "on",
    ) -> rows.Row:
        passes, key = [], (*_key(size, recipe), kernels)
        if section != "sharded":
            self.milliseconds[key] = seconds * 1e3
        parts = 1 if section == "tp" else self.world
        row = {"ms": seconds * 1e3, "ktokens_s": parts * size.tokens / seconds * 1e-3} | case.facts
        if "peak_gb" in row and recipe:
            row["shared_gb"] = p2p_copy.memory(*PURPOSES.get(section, (GATHERS, SUMS))) * 1e-9
        row["tflops"] = parts / self.world * size.flop() / seconds * 1e-12
        if beside is not None:
            row["share"] = beside / seconds
            if recipe in GOALS and (self.world > 1 or section == "sharded"):
                row["goal"] = GOALS[recipe]
                passes.append(row["share"] >= GOALS[recipe])
        if key in self.alone:
            row["scaling"] = self.alone[key] / row["ms"] / (self.world if section == "tp" else 1)
            if section in SCALING_GOALS:
                row["scaling_goal"] = SCALING_GOALS[section]
                passes.append(row["scaling"] >= SCALING_GOALS[section])
        return row | ({"pass": all(passes)} if passes else {})

    def _wire(self) -> rows.Row:
        device = self.args.device
        whole = torch.zeros(WIRE_BYTES if device == "cuda" else 1 << 20, dtype=torch.uint8, device=device)
        part = whole[: len(whole) // self.world].clone()
        number, numbers = part.view(torch.float32), whole.view(torch.float32)
        received = len(whole) * (self.world - 1) / self.world * 1e-9
        gather = _timed(lambda: collectives.all_gather(whole, part), device)
        reduce = _timed(lambda: collectives.reduce_scatter(number, numbers), device)
        return {"gather_gbs": received / gather, "reduce_gbs": received / reduce}


def _key(size: Size, recipe: str) -> tuple:
    return size.tokens, str(size.model), recipe


def divisible(size: Size, ranks: int) -> Size:
    """The size with an MLP whose width ranks share out in whole blocks of 32."""
    multiple = 32 * ranks
    width = -(-ffn_width(size.model) // multiple) * multiple
    return size if width == ffn_width(size.model) else replace(size, model=size.model.model_copy(update={"ffn": width}))


def _timed(call: Callable[[], object], device: str, repeats: int = 10) -> float:
    """The seconds of a call, on average after a few that are not counted."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        call()
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    wait()
    return (time.perf_counter() - start) / repeats


def _work(rank: int, world: int, args: argparse.Namespace, alone: dict[tuple, float]) -> dict[tuple, float]:
    if args.quick:
        torch.compiler.set_stance("force_eager")
    bench = Bench(args, alone)
    bench.run()
    if rank == 0:
        rows.finish(bench.writer, COLUMNS, fail=False)
    return bench.milliseconds


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", nargs="+", choices=[name for name in SIZES if name != "moe"], default=["M", "L"])
    parser.add_argument("--quick", action="store_true", help="a tiny shape instead of --size, torch not compiled")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--deterministic", nargs="+", choices=("on", "off"), default=["on"])
    parser.add_argument("--ranks", type=int, help="(default: as many as there are GPUs, on CPUs 2)")
    parser.add_argument("--tp", action="store_true", help="also tensor parallel steps")
    parser.add_argument("--ep", action="store_true", help="also experts over ranks")
    parser.add_argument("--turns", type=int, default=3, help="of each case beside compiled torch")
    rows.add_arguments(parser, SECTIONS)
    args = parser.parse_args(arguments)
    gpus = torch.cuda.device_count() if args.device == "cuda" else None
    args.ranks = args.ranks or gpus or 2
    if gpus is not None and args.ranks > gpus:
        parser.error(f"--ranks {args.ranks}: ranks that share a GPU say nothing of speed, and there are {gpus} GPUs")
    args.sizes = {"quick": QUICK} if args.quick else {name: SIZES[name] for name in args.size}
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    alone: dict[tuple, float] = {}
    for world in dict.fromkeys((1, args.ranks)):
        alone = spawn_ranks(world, _work, world, args, alone, backend=backend(args.device), timeout_s=600)[0]


if __name__ == "__main__":
    main()
