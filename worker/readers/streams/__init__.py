"""Streams of records, with and without an end."""
