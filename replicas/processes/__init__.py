"""Replica groups of processes, which MPI starts."""
