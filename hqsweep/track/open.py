"""The tracker of a run, by the `track` section of its config."""

from hqsweep.config.engine import check_installed
from hqsweep.sweep.store.run_dir import RunDir
from hqsweep.track.background import BackgroundTracker
from hqsweep.track.tracker import NullTracker, Tracker


def open_tracker(run: RunDir) -> Tracker:
    """The tracker that the `track` section of the run's config asks for.

    Raises UserError when it asks for one whose package is not there.
    """
    config = run.config()
    kind = config["track"]["kind"]
    if kind == "none":
        return NullTracker()
    check_installed(kind)

    def opened() -> Tracker:
        if kind == "tensorboard":  # only here, so that a kind works without the packages of the others
            from hqsweep.track.tensorboard import open_tensorboard

            return open_tensorboard(run, config)
        from hqsweep.track.wandb import open_run

        return open_run(run, config)

    return BackgroundTracker(opened)
