"""hqsweep: which low-precision training recipe can I trust?

Importing the package loads nothing heavy: neither torch nor the compiled extension (hqsweep._C).
"""

import importlib
import os
import sys
from typing import Any

__version__ = "0.1.0"

# Only the loader of an editable install has rebuild(): importing hqsweep._C there runs `cmake`, which lies beside the
# interpreter, and so not on PATH, in a virtual environment that is not activated.
if hasattr(__loader__, "rebuild"):
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])

_HOME: dict[str, str] = {
    "conversion_of": "hqsweep.models.convert",
    "convert": "hqsweep.models.convert",
    "converted": "hqsweep.models.convert",
    "load_model": "hqsweep.models.hf",
    "nonfinite": "hqsweep.ops.quantize.nonfinite",
    "probe_loss": "hqsweep.jobs.probe.loss",
    "recipe": "hqsweep.recipe",
    "revert": "hqsweep.models.convert",
    "unpacked": "hqsweep.models.hf",
    "inspect_checkpoint": "hqsweep.checkpoints.inspect",
    "load_checkpoint": "hqsweep.checkpoints.weights",
    "save_model": "hqsweep.checkpoints.weights",
    "load_sharded": "hqsweep.checkpoints.sharded_load",
    "save_sharded": "hqsweep.checkpoints.sharded_save",
    "save_sharded_async": "hqsweep.checkpoints.sharded_save",
    "Alerts": "hqsweep.sweep.alerts",
    "Comparison": "hqsweep.api.comparison",
    "Run": "hqsweep.api.sweep",
    "Sweep": "hqsweep.api.sweep",
    "UserError": "hqsweep.errors",
    "compare": "hqsweep.api.comparison",
    "Judgement": "hqsweep.api.judgement",
    "judge": "hqsweep.api.judgement",
    "Ladder": "hqsweep.api.ladder",
    "ladder": "hqsweep.api.ladder",
    "query": "hqsweep.api.comparison",
    "run": "hqsweep.api.sweep",
    "serve": "hqsweep.api.serve",
    "Shards": "hqsweep.shards.reader",
    "prepare": "hqsweep.shards.prepare",
    "track": "hqsweep.track",
}
"""Name of the Python interface -> the module that has it, which is imported when the name is first read."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hqsweep' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    return module if name in ("recipe", "track") else getattr(module, name)  # packages that are called


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
