"""The process of a command: exit codes, memory, signals, silence."""
