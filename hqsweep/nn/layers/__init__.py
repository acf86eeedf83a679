"""Layers of a transformer, and modules whose weight is not a GEMM operand: norms and embeddings."""
