"""How replicas exchange rows: remote buffers in their own memory, or callbacks to a store."""
