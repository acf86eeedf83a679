"""Attention: six products by recipe, or the fastest high-precision kernels; rotary positions."""
