"""The store in memory: tables, lookups, commits."""
