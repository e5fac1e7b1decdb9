"""Replica groups: workers that exchange arrays by collectives, without a master."""
