"""A store served to other processes."""
