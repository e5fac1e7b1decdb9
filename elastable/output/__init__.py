"""What a run leaves behind and shows: run directory, curves, progress."""
