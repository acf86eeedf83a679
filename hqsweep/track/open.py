"""The tracker of a run, by the `track` section of its config."""

from importlib.util import find_spec

from hqsweep.errors import UserError
from hqsweep.sweep.store import RunDir
from hqsweep.track.background import BackgroundTracker
from hqsweep.track.tracker import NullTracker, Tracker


def open_tracker(run: RunDir) -> Tracker:
    """The tracker that the `track` section of the run's config asks for.

    Raises UserError when it asks for wandb and there is none.
    """
    config = run.config()
    if config["track"]["kind"] == "none":
        return NullTracker()
    if find_spec("wandb") is None:
        raise UserError("track.kind: 'wandb' needs the package wandb; `pip install wandb`, or set track=none")

    def opened() -> Tracker:
        from hqsweep.track.wandb import open_run  # only here, so that track=none works without wandb

        return open_run(run, config)

    return BackgroundTracker(opened)
