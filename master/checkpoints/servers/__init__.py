"""Checkpoints of jobs whose rows are on store servers: what the servers write, and what the master asks of them."""
