"""Operators of a model other than quantization: norms, activations, rotary positions, experts, losses, AdamW."""
