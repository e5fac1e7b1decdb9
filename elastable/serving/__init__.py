"""Predictions over HTTP: requests and replies of the protocols, and the process that answers them."""

__all__ = ["batches", "process", "protocols", "service"]
