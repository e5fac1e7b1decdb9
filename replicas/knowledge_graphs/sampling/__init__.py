"""Batches of triples with their candidates, and batches of queries."""
