"""Keras callbacks in a job."""
