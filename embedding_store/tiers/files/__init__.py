"""Tables in files, larger than memory."""

__all__ = ["file_tier"]
