"""What differs between the frameworks that Keras runs on, one module each."""

__all__ = ["contract", "lazy"]
