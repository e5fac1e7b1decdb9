"""A job in processes: master, workers, parameter server, resuming."""

__all__ = ["engines", "job_hooks", "master_process", "options", "prepare", "serving", "worker_process"]
