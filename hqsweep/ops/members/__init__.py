"""Groups of matrices in one memory: layout, splits, padding."""
