"""Tracking: local rows are the source of truth, W&B is a mirror of them."""
