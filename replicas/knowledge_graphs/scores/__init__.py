"""Score functions of knowledge-graph embeddings, by name."""

__all__ = ["dot_products", "functions"]
