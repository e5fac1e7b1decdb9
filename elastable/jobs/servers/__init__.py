"""How the processes of a job find each other."""

__all__ = ["finding", "store_registry"]
