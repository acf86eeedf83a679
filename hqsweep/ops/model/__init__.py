"""Operators of a model that are no quantization: norms, activations, rotary positions, experts, losses, AdamW."""
