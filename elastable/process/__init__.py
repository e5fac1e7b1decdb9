"""The process of a command: exit codes, memory, signals, silence."""

__all__ = ["child", "exit_codes", "heap", "logs", "quiet", "repeating", "settings", "stopping", "version"]
