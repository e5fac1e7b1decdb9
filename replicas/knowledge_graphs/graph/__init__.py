"""A graph and its shards: triples, names, known triples, and which shard holds which entity."""

__all__ = ["batch", "knowledge_graph", "randomness", "sharding", "triple_files"]
