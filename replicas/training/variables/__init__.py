"""Variables and optimizer state that replicas share in parts."""

__all__ = ["exchange", "optimizer", "placement", "split"]
