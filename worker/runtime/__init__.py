"""The worker's main loop: tasks, prefetched rows, micro-batches."""
