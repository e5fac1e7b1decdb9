"""gRPC servers: bounded, with roles and an audit log."""
