"""A job in processes: master, workers, parameter server, resuming."""
