"""A graph and its shards: triples, names, known triples, and which shard holds which entity."""

__all__ = ["batch", "knowledge_graph", "known_triples", "names", "randomness", "sharding", "triple_files"]
