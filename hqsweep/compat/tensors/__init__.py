"""Quantized tensors by the names of TransformerEngine."""
