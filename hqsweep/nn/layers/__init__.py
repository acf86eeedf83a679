"""Layers of a transformer, and modules whose weight is no GEMM operand: norms and embeddings."""
