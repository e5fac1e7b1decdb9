"""How the suite runs: seeds, order, what may be skipped, what the quick run leaves out, and delays."""
