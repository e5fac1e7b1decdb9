"""The live page: what it shows, and how that gets to a browser."""
