"""Keras layers whose tables live in a store."""

__all__ = ["distributed_embedding", "embedding", "model_tables"]
