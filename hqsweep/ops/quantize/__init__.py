"""Quantization and its inverse: operators, requests, and the reference."""
