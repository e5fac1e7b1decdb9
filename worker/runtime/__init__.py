"""The worker's main loop: tasks, prefetched rows, micro-batches."""

__all__ = ["compute", "loop", "work_here", "worker_measures"]
