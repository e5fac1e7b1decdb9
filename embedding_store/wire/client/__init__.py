"""A store in another process, over gRPC."""
