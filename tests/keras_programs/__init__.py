"""Keras programs drawn at random, each run with plain Keras and with its tables in a store."""
