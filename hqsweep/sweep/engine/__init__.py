"""Runs on their way to the end: workers, slots, ranks, jobs of Slurm, trunks before forks."""
