"""One module for every part of the `elastable` command; each only parses, calls and prints."""

__all__ = ["checkpoint_commands", "job", "kg", "log", "model_commands", "plan", "replicas", "store_commands"]
