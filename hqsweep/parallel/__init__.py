"""What a model over several ranks is made by: the mesh, and each kind of parallelism."""
