"""Records of tables in Redis: requests and replies in bulk."""

__all__ = ["record_codec", "record_transfer"]
