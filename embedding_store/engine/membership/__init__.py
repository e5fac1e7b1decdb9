"""Which ids have a row: admission, eviction, touches."""
