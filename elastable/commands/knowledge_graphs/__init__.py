"""Commands about trained models of knowledge graphs: `elastable kg evaluate` and those that follow it."""

__all__ = ["querying"]
