"""Metrics and where their values come from: the state that a process has anyway, read when somebody asks."""
