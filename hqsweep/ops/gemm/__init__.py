"""Products of bfloat16 matrices."""
