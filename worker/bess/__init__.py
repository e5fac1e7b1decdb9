"""Balanced entity sampling and sharing (BESS): knowledge graphs over a replica group.

Entities are spread over n shards of equal size, one a worker; triples are
sampled evenly from every pair of shards; so each worker reads and sends the same
number of rows in every step (Cattaneo et al., "BESS: Balanced Entity Sampling and
Sharing for Large-Scale Knowledge Graph Completion", 2022).

    graph      = load_graph("DIR" or "umls", unseen="keep")                          graph.py, names.py, triple_file.py
    sharding   = Sharding.create(entities, shards, seed=0, entity_types=None)        sharding.py
    partition  = PartitionedTriples.create(triples, sharding, mode="pair")           partition.py
    triples    = with_inverses(triples, relations)
    known      = KnownTriples.create(entities, relations, triples, ...)              known.py
    negatives  = RandomNegatives(sharding, count, corruption="ht", shared=False, seed=0, ...)    negatives.py
                 TypedNegatives, TripleNegatives, AllEntities
    sampler    = RigidSampler(partition, batch, seed=0, negatives=..., weighting=...)    sampler.py
                 RandomSampler(...)
    batch      = sampler.batch(step, worker) -> StepBatch; sampler.steps_per_epoch
    with BatchesAhead(sampler, worker, start=step) as batches: ...                   ahead.py
    for queries in query_batches(triples, sharding, worker, side="tail", batch=64)   queries.py -> Queries
    counts     = RankCounts(true_scores); counts.add(scores, counted); counts.ranks() ranking.py
    quality    = RankingMetrics(hits=(1, 3, 10)); quality.add(side, ranks, mask); quality.result()
"""
