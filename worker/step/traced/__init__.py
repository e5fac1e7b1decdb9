"""The user's own `train_step`: tracing, planning, and running it."""

__all__ = ["own_step", "step_plan"]
