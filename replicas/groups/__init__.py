"""Replica groups: workers that exchange arrays by collectives, in threads or in processes that MPI starts."""

__all__ = ["group", "mpi_group", "peer_monitor", "thread_group", "world"]
