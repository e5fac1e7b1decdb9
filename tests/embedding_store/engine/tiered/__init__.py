"""Tests of `elastable.embedding_store.engine.tiered`."""
