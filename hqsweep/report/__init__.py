"""Answers from run folders: tidy frames, paired comparison, tables, one HTML page, and the gate for CI.

frames reads; curves, families, arms and verdict compute what is claimed; tables and html show it, with the figures of
figures, points and heatmaps in one look; compare joins them. baseline, gate, check and summary are the CI's side.
job_tables prints parity and calibrate, and gemm_plans says what computed each GEMM; probe, junit and listing are small
and stand by themselves.
"""
