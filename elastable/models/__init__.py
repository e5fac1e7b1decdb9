"""A model on its way: what was not trained, saving it."""

__all__ = ["saving", "trained"]
