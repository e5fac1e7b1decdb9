"""What the worker needs of Keras: its backend, callbacks, seeds, threads, methods and types."""

__all__ = [
    "keras_backend",
    "keras_methods",
    "same_optimizer",
    "seeds",
    "structures",
]
