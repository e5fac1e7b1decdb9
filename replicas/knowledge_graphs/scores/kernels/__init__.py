"""Comparisons of queries with candidates, and the kernels that compute them."""

__all__ = ["comparison", "distances", "dot_products"]
