"""Variables and optimizer state that replicas share in parts."""
