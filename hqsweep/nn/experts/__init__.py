"""Mixtures of experts: the router, grouped linears, and the way of tokens to the ranks of their experts."""
