"""Balanced entity sampling and sharing (BESS): knowledge graphs over a replica group.

Entities are spread over n shards of equal size, one per worker, and triples are
sampled evenly from every shardpair. So each worker reads and sends the same
number of rows in every step (Cattaneo et al., "BESS: Balanced Entity Sampling and
Sharing for Large-Scale Knowledge Graph Completion", 2022).

    graph     = load_graph("FOLDER")                                     `knowledge_graph`
    sharding  = Sharding.create(entities, shards, seed=0)               `sharding`
    partition = PartitionedTriples.create(triples, sharding)            `partition`
    known     = KnownTriples.create(entities, relations, triples)       `known_triples`
    negatives = RandomNegatives(sharding, count, corruption="ht")       `random_negatives`; also TypedNegatives
                TripleNegatives, AllEntities                            `triple_negatives`, `all_entities`
    sampler   = RigidSampler(partition, batch_per_worker, negatives=negatives, weights=frequency_weights(...))
                RandomSampler(...)                                      `rigid_sampler`, `random_sampler`
    batch     = sampler.batch(step, worker)                             `batch`: StepBatch
    queries   = QueryBatches(triples, sharding, "tail", count)          `queries`
    counts    = RankCounts(true_scores); counts.add(scores, ...)        `ranking`
    metrics   = RankingMetrics(); metrics.add("tail", ranks)            `ranking`
"""
