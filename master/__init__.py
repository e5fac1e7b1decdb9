"""One authoritative model version: discovery, tasks, accumulation, commit, checkpoint."""
