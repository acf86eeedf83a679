"""Attention by recipe: six products, or the fastest kernels of high precision; rotary positions."""
