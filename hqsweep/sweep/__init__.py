"""Sweeps: grid expansion, the run store, the engine that runs workers, the progress display."""
