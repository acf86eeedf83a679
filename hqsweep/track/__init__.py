"""Tracking: local rows are the source of truth, W&B is a mirror of them.

The package is also a function: `with hqsweep.track("sweep", arm="nvfp4", seed=0) as run:` makes a run of a loop of the
user's own (own_loop.track).
"""

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a run of a loop of your own: the function hqsweep.track.own_loop.track, with its arguments."""
        from hqsweep.track.own_loop import track

        return track(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
