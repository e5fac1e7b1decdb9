"""The master on the wire: messages, client, service."""
