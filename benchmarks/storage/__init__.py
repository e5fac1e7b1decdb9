"""What keeps rows: tiers, logs, checkpoints, Redis."""
