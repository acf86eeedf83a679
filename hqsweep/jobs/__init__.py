"""Jobs: each takes a resolved config and gives rows. Each module has run(config, sink, workspace)."""
