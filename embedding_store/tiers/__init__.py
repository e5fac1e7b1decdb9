"""Stores whose rows lie elsewhere: in files, in Redis; and a cache of any of them."""
