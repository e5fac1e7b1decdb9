"""A worker's life: tasks, rows ahead, one micro-batch after the other."""
