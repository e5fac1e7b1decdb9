"""The master on the wire: messages, client, service."""

__all__ = ["client", "master_service", "messages"]
