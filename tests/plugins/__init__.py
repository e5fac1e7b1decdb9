"""How the suite runs: seeds, order, what may be skipped, and what the quick run leaves out."""
