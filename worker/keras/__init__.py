"""What the worker needs of Keras: its backend, callbacks, seeds, threads, methods and types."""
