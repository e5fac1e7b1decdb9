"""Keras as it is found: backend, callbacks, seeds, threads, its methods handed over."""
