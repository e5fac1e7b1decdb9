"""Connections of clients: channels, failover, errors."""

__all__ = ["server_connection", "status_codes"]
