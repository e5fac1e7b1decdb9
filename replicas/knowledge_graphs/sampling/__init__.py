"""Batches of training triples, and the candidates that they are scored with."""

__all__ = ["negatives", "samplers"]
