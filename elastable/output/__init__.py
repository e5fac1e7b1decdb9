"""What a run leaves behind and shows: run directory, curves, progress."""

__all__ = ["noted", "progress_bars", "run_directory"]
