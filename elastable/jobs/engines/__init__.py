"""Who starts the processes of a job: this machine, or a cluster that people run already. No other room knows which."""

__all__ = ["engine", "job_on_engine", "ray_actors", "roles"]
