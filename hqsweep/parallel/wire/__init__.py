"""Messages between ranks: collectives whose bytes do not depend on the backend, and copies between GPUs."""
