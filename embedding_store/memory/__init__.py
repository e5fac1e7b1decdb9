"""Rows in the memory of one process: index, weights, slots, who is admitted and evicted."""
