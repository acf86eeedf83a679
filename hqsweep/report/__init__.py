"""From run folders to answers: tidy frames, paired comparison, tables, one HTML page, and the gate for CI.

frames reads, arms computes, tables and html show, compare joins them; gate, check, parity, junit and listing are small
and stand by themselves.
"""
