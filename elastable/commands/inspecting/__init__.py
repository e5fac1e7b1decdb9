"""`elastable status` and `elastable lookup`: what a running job or a store holds."""

__all__ = ["config", "lookup", "status"]
