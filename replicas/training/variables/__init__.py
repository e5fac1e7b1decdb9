"""Variables and optimizer state that replicas share in parts."""

__all__ = ["optimizer", "placement", "split", "variable_exchange"]
