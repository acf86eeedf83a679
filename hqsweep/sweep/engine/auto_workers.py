"""engine.workers=auto: as many runs at a time on each GPU as gain tokens a second, measured and remembered.

One run is timed, then two at once, then four, while the gain is at least GAIN. The result is kept in the user's cache
by card, model, training and recipe, so that the next sweep of this kind measures nothing. On a CPU, auto is one run.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hqsweep.config.job import Config, ConvergenceConfig
from hqsweep.config.safe import loads
from hqsweep.errors import UserError
from hqsweep.host import cache_folder, usable_cpus, write_whole
from hqsweep.jobs.pace import Pace, measure
from hqsweep.sweep.engine.process import visible_gpus
from hqsweep.train.build import pick_device

GAIN = 1.05
"""The least ratio of the tokens a second of more runs at a time to those of fewer."""
MOST = 8
"""The most runs at a time on one GPU."""


def runs_at_a_time(configs: Sequence[Config], imports: Sequence[str], say: Callable[[str], None]) -> int | None:
    """The number for engine.workers=auto; None for one run, where no GPU decides. `say` gets a line about the choice.

    configs: of all runs; the first training in low precision is measured, else the first one.
    """
    trainings = [config for config in configs if isinstance(config, ConvergenceConfig)]
    if not trainings or pick_device(trainings[0].train.device).type != "cuda":
        return None
    if trainings[0].train.parallel.world > 1:
        return None
    low = [config for config in trainings if config.recipe.name not in ("bf16", "fp32")]
    config = (low or trainings)[0].model_dump(mode="json")
    gpus = max(1, len(visible_gpus()))
    each = runs_per_gpu(config, imports, say)
    return min(gpus * each, len(configs))


def runs_per_gpu(config: Mapping[str, Any], imports: Sequence[str], say: Callable[[str], None]) -> int:
    """The number of runs on one GPU that has the most tokens a second, from the cache or measured now."""
    card = torch.cuda.get_device_name()
    file = cache_folder() / "workers" / f"{_key(config, card)}.json"
    if (known := _known(file)) is not None:
        say(f"engine.workers=auto: {_runs(known)} at a time on {card}, as measured before ({file})")
        return known
    say(f"engine.workers=auto: timing a few steps of one run on {card}, then of more at once")
    threads = max(1, usable_cpus() // MOST)
    best = measure(config, threads=threads, imports=imports)
    say(f"engine.workers=auto: {_said(best)}")
    while best.together < MOST and _fits(best):
        try:
            more = measure(config, together=2 * best.together, threads=threads, imports=imports)
        except UserError as fault:  # such as one of memory
            say(f"engine.workers=auto: {2 * best.together} at once cannot be timed ({fault})")
            break
        say(f"engine.workers=auto: {_said(more)}")
        if more.tokens_per_s < GAIN * best.tokens_per_s:
            break
        best = more
    _keep(file, {"runs": best.together, "tokens_per_s": best.tokens_per_s, "card": card, "torch": torch.__version__})
    say(f"engine.workers=auto: {_runs(best.together)} at a time on each GPU")
    return best.together


def _said(pace: Pace) -> str:
    return f"{pace.together} at once: {pace.tokens_per_s:,.0f} tokens/s, {pace.memory / 2**30:.1f} GiB each"


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count != 1)}"


def _fits(pace: Pace) -> bool:
    """Whether twice as many runs fit into the memory of the GPU."""
    total = torch.cuda.get_device_properties(0).total_memory
    return 2 * pace.together * pace.memory < 0.9 * total


def _key(config: Mapping[str, Any], card: str) -> str:
    """The hash of all that decides the pace: card, torch, model, training, recipe and source of data."""
    model = {key: value for key, value in config["model"].items() if key not in ("init_noise", "path")}
    train = {key: value for key, value in config["train"].items() if key not in ("steps", "lr", "warmup", "decay")}
    parts = [card, torch.__version__, model, train, config["recipe"], config["data"].get("source")]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _known(file: Path) -> int | None:
    try:
        runs = loads(file.read_bytes())["runs"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return runs if isinstance(runs, int) and 1 <= runs <= MOST else None


def _keep(file: Path, content: Mapping[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(content).encode())
    except OSError:
        return  # the next sweep measures again
