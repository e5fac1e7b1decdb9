"""Score functions of knowledge-graph embeddings, by name."""

__all__ = ["catalogue", "dot_products", "functions"]
