"""Runs on their way to the end: workers, slots, ranks, trunks before forks."""
