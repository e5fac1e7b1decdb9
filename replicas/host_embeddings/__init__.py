"""Host embeddings: tables in the replicas' own memory, or a store's, looked up from within a Keras model."""
