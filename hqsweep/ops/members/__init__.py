"""Groups of matrices (members) in one memory: layout, splits, padding."""
