"""Tests of which ids have a row."""
