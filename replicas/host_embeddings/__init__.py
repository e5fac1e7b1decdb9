"""Host embeddings: tables in the replicas' own memory or in a store, looked up by a Keras model."""

__all__ = ["embedding", "file", "host_table", "optimizer_spec"]
