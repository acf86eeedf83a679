"""Quantization and its inverse: operators, requests, outputs, and the reference."""
