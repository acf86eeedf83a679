"""What every module and every call has: options, quantizers, the context of a forward pass, weights, probes."""
