"""Numbers of 8 and 16 bits, converted and rounded."""
