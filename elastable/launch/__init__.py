"""`elastable replicas`: processes that form a replica group, started and ended together."""

__all__ = ["launch", "program"]
