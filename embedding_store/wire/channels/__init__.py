"""Connections of clients: channels, failover, errors."""
