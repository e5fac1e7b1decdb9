"""Stores whose rows lie elsewhere: in files, in Redis."""
