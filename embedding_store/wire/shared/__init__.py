"""A memory store's rows, read by other processes of its host without a copy."""
