"""Verdicts on runs of other programs: readers of logs, one value for each run, and the judge's words for any metric."""
