"""Losses: what their terms are divided by, their parts, their scale."""

__all__ = ["loss_parts", "loss_terms", "origins", "recording"]
