"""Tables in memory: lookups, updates, and what kinds of them cost."""
