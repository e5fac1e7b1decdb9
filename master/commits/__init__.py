"""From pushes to a version: which count, their sum, clipping, the commit."""
