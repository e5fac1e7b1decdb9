"""One module for every part of the `elastable` command; each only parses, calls and prints."""

__all__ = ["checkpoint", "job", "kg", "log", "model", "plan", "replicas", "store"]
