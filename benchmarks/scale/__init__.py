"""Stub workers against store servers: rows and gradients are real, the dense step is a pause."""
