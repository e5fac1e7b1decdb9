"""Schemes: how triples and candidates that lie on different workers meet to be scored."""
