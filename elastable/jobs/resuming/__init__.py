"""Where a job begins whose store or checkpoints are there already."""

__all__ = ["continuing", "resume"]
