"""Rows of a layer: their source, initial values, combination and saving."""
