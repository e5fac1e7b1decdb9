"""Optimizers of rows beyond the store's own: Keras itself, averages, constraints."""
