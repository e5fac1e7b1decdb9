"""Score functions of knowledge-graph embeddings, by name."""

__all__ = ["comparison", "dot_products", "functions"]
