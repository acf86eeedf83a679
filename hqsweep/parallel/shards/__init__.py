"""Shards of quantized tensors: their place in the whole, and how ranks quantize and gather them to the same bytes."""
