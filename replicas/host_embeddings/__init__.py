"""Host embeddings: tables in the replicas' own memory or in a store, looked up by a Keras model."""

__all__ = ["host_embedding", "host_table"]
