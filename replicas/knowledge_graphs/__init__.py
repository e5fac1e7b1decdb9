"""Balanced entity sampling and sharing (BESS): knowledge graphs over a replica group.

Entities are spread over n shards of equal size, one per worker, and triples are
sampled evenly from every shardpair. So each worker reads and sends the same
number of rows in every step (Cattaneo et al., "BESS: Balanced Entity Sampling and
Sharing for Large-Scale Knowledge Graph Completion", 2022).

    graph     = load_graph("FOLDER")                                    `graph`
    sharding  = Sharding.create(entities, shards, seed=0)               `graph`
    partition = PartitionedTriples.create(triples, sharding)            `graph`
    known     = KnownTriples.create(entities, relations, triples)       `graph`
    negatives = RandomNegatives(sharding, count, corruption="ht")       `sampling`; also TypedNegatives
                TripleNegatives, AllEntities                            `sampling`
    sampler   = RigidSampler(partition, batch_per_worker, negatives=negatives, weights=frequency_weights(...))
                RandomSampler(...)                                      `sampling`
    batch     = sampler.batch(step, worker)                             `graph`: StepBatch
    queries   = QueryBatches(triples, sharding, "tail", count)          `evaluation`
    counts    = RankCounts(true_scores); counts.add(scores, ...)        `evaluation`
    metrics   = RankingMetrics(); metrics.add("tail", ranks)            `evaluation`
"""
