"""Versions that stay readable: pins."""
