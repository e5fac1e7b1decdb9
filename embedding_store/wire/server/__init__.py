"""gRPC servers: bounded, with roles and an audit log."""

__all__ = ["call_room", "grpc_server", "handlers"]
