"""The comparison: pairs of runs, and the verdict on each arm."""
