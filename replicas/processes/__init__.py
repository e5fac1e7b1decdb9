"""Replica groups of processes, which MPI starts."""

__all__ = ["mpi_group", "peer_monitor", "world"]
