"""A report beside the runs that it is of, where W&B tracks them. Imports neither wandb nor torch unless needed, so that
`hqsweep compare` starts fast.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hqsweep.sweep.store import RunDir


def mirror_report(runs: Sequence[RunDir], report: Path) -> bool:
    """Keep a report folder as an artifact beside runs that W&B tracks; False when there is none to keep it by."""
    track = runs[0].config().get("track", {})
    if track.get("kind") != "wandb" or find_spec("wandb") is None:
        return False
    from hqsweep.track.wandb import log_report

    return log_report(runs[0].sweep_path, track, report)
