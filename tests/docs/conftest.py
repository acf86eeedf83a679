"""docs/ is not in the installed package: the checkout comes last on the path, so hqsweep stays as installed."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
