"""Finite and endless streams of records."""
