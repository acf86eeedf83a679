"""Exchanges of ranks that share a linear, hidden behind products."""
