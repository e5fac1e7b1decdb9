"""The user's own `train_step`: tracing, planning, and running it."""
