"""What a process shows of itself over HTTP: metrics, health, and a live page."""

__all__ = ["metrics", "tracing", "watching"]
