"""A training: its data, its model and its loop, each to be read from top to bottom."""
