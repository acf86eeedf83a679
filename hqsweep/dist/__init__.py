"""Collectives on plain tensors, whose bytes do not depend on the backend."""
