"""Records of tables in Redis: requests and replies in bulk."""

__all__ = ["record_replies", "record_transfer"]
