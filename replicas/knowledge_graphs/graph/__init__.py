"""A graph and its shards: triples, names, known triples, and which shard holds which entity."""
