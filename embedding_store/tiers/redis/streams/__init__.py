"""The write-ahead log of a store as a Redis Stream."""
