"""Records in memory: pytrees of arrays, ragged arrays, tensors, and the Reader class."""

__all__ = ["pytrees", "ragged", "reader"]
