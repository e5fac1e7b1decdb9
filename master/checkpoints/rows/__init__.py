"""Rows of checkpoints: all of them, or those that changed."""
