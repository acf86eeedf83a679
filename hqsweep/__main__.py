"""`python -m hqsweep` is the command `hqsweep`, which imports nothing from the working directory either."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # where `-m` puts it

from hqsweep.cli.main import main

if __name__ == "__main__":
    main()
