"""Checkpoints of a training over ranks."""
