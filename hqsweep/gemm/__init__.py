"""The products of quantized operands: exact, native, and over experts."""
