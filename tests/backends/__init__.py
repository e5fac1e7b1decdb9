"""Keras on JAX and on PyTorch: processes of each, which cannot import any other framework.

`make test` runs them on JAX, `make test-torch` on PyTorch, in an environment of its own. The process of pytest itself
has TensorFlow, and holds their numbers against it.
"""
