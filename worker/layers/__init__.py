"""Keras layers whose tables live in a store."""
