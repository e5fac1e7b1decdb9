"""gRPC servers: bounded, with roles and an audit log."""

__all__ = ["call_room", "connections", "grpc_server", "handlers"]
