"""Comparisons of queries with candidates, and the kernels that compute them."""
