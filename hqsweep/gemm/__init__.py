"""Products of quantized operands: exact, native, and grouped over experts."""
