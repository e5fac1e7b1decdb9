"""Schemes: how triples and candidates on different workers are brought together to be scored."""

__all__ = ["candidate_losses", "whole_losses"]
