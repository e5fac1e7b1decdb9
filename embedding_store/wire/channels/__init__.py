"""Connections and who may use them: channels, credentials, failover, errors, servers."""
