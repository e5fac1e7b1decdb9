"""What every room may need and what knows nothing of tables: files, locks, retries, addresses."""
