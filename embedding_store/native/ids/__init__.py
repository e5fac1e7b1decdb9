"""Ids found in memory: hash index, row directory, hot set; ids of strings."""
