"""Quantization and its inverse: the operators, their requests and outputs, and the reference beside them."""
