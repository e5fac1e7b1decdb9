"""The master of a job: its state, the thread that makes versions, its hooks."""
