"""What is to be done, and by whom: schedule, record order, leases, workers."""
