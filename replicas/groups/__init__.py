"""Replica groups: workers that exchange arrays by collectives, with no master between them."""
