"""Hyper-parameter search: which settings train the best model of a graph."""
