"""What is sent: frames, specs, commits and rows as bytes."""

__all__ = ["frames", "plain_data", "store_messages"]
