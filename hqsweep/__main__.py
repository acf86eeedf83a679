"""`python -m hqsweep` is the command `hqsweep`."""

from hqsweep.cli.main import main

if __name__ == "__main__":
    main()
