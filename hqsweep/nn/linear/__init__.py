"""Linears and the operations fused to them: a norm before, an activation between, the loss after the last."""
