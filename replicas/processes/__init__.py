"""Members of a replica group in processes of their own, which MPI starts."""
