"""Embedding tables: what a table is, where its rows lie, how they change. Never imports TensorFlow."""
