"""Linears, with what is fused to them: norms before, activations between, the loss behind the last."""
