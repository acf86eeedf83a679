"""hqsweep: which low-precision training recipe can I trust?

Importing the package loads nothing heavy: neither torch nor the compiled extension (hqsweep._C).
"""

import os
import sys

__version__ = "0.1.0"

# Only the loader of an editable install has rebuild(): importing hqsweep._C there runs `cmake`, which lies beside the
# interpreter, and so not on PATH, in a virtual environment that nobody activated.
if hasattr(__loader__, "rebuild"):
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])
