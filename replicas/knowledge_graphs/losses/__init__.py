"""Losses and regularizers of triples."""
