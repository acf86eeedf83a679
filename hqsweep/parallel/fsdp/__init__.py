"""The use of torch's fully_shard: what it gathers, in which dtype, and how gradients are summed."""
