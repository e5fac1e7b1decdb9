"""Row optimizers: from a summed gradient to new weights and slots."""

__all__ = ["base", "fused", "registry"]
