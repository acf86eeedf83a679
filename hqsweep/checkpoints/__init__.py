"""Checkpoints of other programs and of trainings over ranks."""
