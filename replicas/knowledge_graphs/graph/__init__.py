"""A graph and its shards: triples, names, what is known, and which shard holds what."""
