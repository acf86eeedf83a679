"""The comparison: which runs are paired, and what is said of each arm."""
