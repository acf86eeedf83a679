"""A report beside the runs that it is of, where a tracker has them. Imports neither wandb nor torch unless needed, so
that `hqsweep compare` starts fast.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hqsweep.sweep.store.run_dir import RunDir


def mirror_report(runs: Sequence[RunDir], report: Path, arms: Sequence[Mapping[str, Any]]) -> bool:
    """Show the verdicts beside runs that W&B or TensorBoard tracks, and keep the report folder in W&B; False when there
    is none to keep it by. `arms` are those of `hqsweep compare --json`."""
    track = runs[0].config().get("track", {})
    kind = track.get("kind", "none")
    if kind == "none" or find_spec(kind) is None:
        return False
    if kind == "tensorboard":
        from hqsweep.track.tensorboard_report import log_report as log_verdicts

        return log_verdicts(runs[0].sweep_path, report, arms)
    from hqsweep.track.wandb import log_report

    return log_report(runs[0].sweep_path, track, report, arms)
