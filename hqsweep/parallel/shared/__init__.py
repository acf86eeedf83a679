"""Modules of hqsweep.nn as the ranks of a group share them: linears, MLPs, losses, attention, experts and weights."""
