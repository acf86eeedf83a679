"""Optimizers by TransformerEngine's names."""
