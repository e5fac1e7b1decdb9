"""The shard of a store server: pushes of workers, kept until the master of their job says how they make a version."""

__all__ = ["client_pushes", "ownership", "server_contract", "shard", "version_sums"]
