"""Rows of a layer: where they come from, what they begin with, how they are combined and saved."""
