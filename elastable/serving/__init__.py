"""Predictions over HTTP and gRPC: requests and replies of the protocols, and the process that answers them."""

__all__ = ["batches", "over_grpc", "process", "protocols", "service"]
