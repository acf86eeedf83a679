"""Modules by TransformerEngine's names, over the modules of hqsweep.nn."""
