"""Elastable's knowledge-graph training: one step of a single worker."""

import time

from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn
from elastable.embedding_store.contract.malformed import DocumentFields
from elastable.embedding_store.native.range_pool import RangePool
from elastable.process.heap import keep_freed_memory
from elastable.replicas.groups.thread_group import alone
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer


def prepare(race: str, settings: DocumentFields) -> Turn:
    """`race` is the model; a turn's call trains one batch with Adam, negatives of each triple drawn anew.

    With the setting `negatives` 0, each triple's tail competes with all entities.
    """
    keep_freed_memory()
    triples = workloads.triples(settings["entities"], settings["relations"], settings["triples"])
    whole = not settings["negatives"]
    loss = {"loss": "whole-softmax"} if whole else {"loss": "log-sigmoid", "negatives": settings["negatives"]}
    chosen = TrainSettings(
        model=race, dim=settings["dim"], shared=False, corruption="ht", reciprocal=whole, batch=settings["batch"],
        optimizer="adam", learning_rate=1e-3, **loss,
    )  # fmt: skip
    pool = RangePool(workloads.THREADS)
    trainer = GraphTrainer(alone(), chosen, settings["entities"], settings["relations"], triples.astype("int32"), pool)
    return Turn("elastable", trainer.run_step, settings["batch"], time.process_time)
