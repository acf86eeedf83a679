"""Packaged configuration: named sweeps here, groups in the folders. Hydra finds YAML only beside an __init__.py."""
