"""The typed config: the one place where YAML becomes objects."""
