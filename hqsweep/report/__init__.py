"""Answers from run folders: tidy frames, paired comparison, tables, one HTML page, and the gate for CI.

compare reads runs and computes the claims; figures draws them in one look; pages shows them: panels lists the figures,
html, folder and paper write files, text and tables print, show and listing are for `hqsweep show` and `hqsweep ls`,
checks for parity and calibrate. gate judges a sweep by a stored baseline.
"""
