"""Jobs: a resolved config in, rows out. Each module has run(config, sink, workspace)."""
