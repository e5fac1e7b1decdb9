"""Replica groups of processes, which MPI starts."""

__all__ = ["hosts", "mpi_group", "stale_shared_memory", "world"]
