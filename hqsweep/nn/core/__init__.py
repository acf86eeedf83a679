"""The parts that all modules share: options, quantizers, calls, the context of a forward pass, weights, probes."""
