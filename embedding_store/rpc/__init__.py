"""The store on the wire: frames, the gRPC service, and stores in other processes."""
