"""How hqsweep uses torch's fully_shard: dtypes of gathers, their memory, and sums of gradients."""
