"""Schemes: how triples and candidates on different workers are brought together to be scored."""
