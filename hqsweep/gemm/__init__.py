"""Products of operands, quantized or bfloat16: exact, native, and grouped over experts."""
