"""Losses: what their terms are divided by, their parts, their scale."""
