"""Tests of `elastable.embedding_store.engine.unindexed`."""
