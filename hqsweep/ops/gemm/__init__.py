"""Products of bfloat16 matrices, and the scales of native products."""
