"""Stores of earlier releases, read once and rewritten as this release keeps them."""
