"""Checkpoints of other programs: what they hold, and how a model takes it."""
