"""How much one client, and all of them, may ask of a gRPC server."""
