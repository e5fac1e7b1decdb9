"""What every room may need and what knows nothing of tables: files, locks, retries, addresses."""

__all__ = [
    "address",
    "array_body",
    "checked_files",
    "clocks",
    "extras",
    "futures",
    "memory_budget",
    "memory_mapping",
    "printable",
    "readers_writer_lock",
    "retry",
    "store_url",
]
