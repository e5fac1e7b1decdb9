"""What is to be done, and by whom: schedule, record order, leases, workers."""

__all__ = ["progress", "record_order", "schedule", "stream_schedule", "task_board", "worker_records"]
