"""A compiled module from a file in the place of the installed one: a build with sanitizers, say."""

import importlib.util
import sys
from types import ModuleType


def use(path: str) -> ModuleType:
    """Load it as hqsweep._C, before anything has."""
    spec = importlib.util.spec_from_file_location("hqsweep._C", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["hqsweep._C"] = module
    import hqsweep

    hqsweep._C = module
    return module
