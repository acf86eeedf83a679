"""Sweeps from Python and notebooks: the same functions that the commands call, and results as DataFrames and figures.

`import hqsweep as hq` has them as hq.run, hq.Sweep and hq.compare. finish is what run and `hqsweep run` share; sweep
reads, and comparison judges.
"""
