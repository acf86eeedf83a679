"""Checkpoints of other programs: descriptions, and loading into a model."""
