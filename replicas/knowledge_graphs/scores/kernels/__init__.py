"""Compiled comparisons of queries with candidates."""
