"""Rows of tables with a tier: all in memory, or the hot ones of them in frames."""
