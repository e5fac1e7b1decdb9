"""A graph and its shards: triples, names, known triples, and which shard holds which entity."""

from __future__ import annotations

from elastable.replicas.knowledge_graphs.graph.batch import (
    CORRUPTIONS,
    SIDES,
    Corruption,
    Negatives,
    Queries,
    Side,
    StepBatch,
)
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import (
    HEADERS,
    SPLITS,
    GraphSource,
    KnowledgeGraph,
    load_graph,
    save_graph,
)
from elastable.replicas.knowledge_graphs.graph.known_triples import Exclusions, KnownTriples, first_at_least
from elastable.replicas.knowledge_graphs.graph.names import Names, inverse_names
from elastable.replicas.knowledge_graphs.graph.randomness import (
    derived_keys,
    draw_between,
    shuffled_segments,
    stream_key,
)
from elastable.replicas.knowledge_graphs.graph.sharding import (
    PartitionedTriples,
    PartitionMode,
    Sharding,
    checked_triples,
    with_inverses,
)
from elastable.replicas.knowledge_graphs.graph.triple_files import DAMAGED, line_of, read_columns

__all__ = [
    "CORRUPTIONS",
    "DAMAGED",
    "HEADERS",
    "SIDES",
    "SPLITS",
    "Corruption",
    "Exclusions",
    "GraphSource",
    "KnowledgeGraph",
    "KnownTriples",
    "Names",
    "Negatives",
    "PartitionMode",
    "PartitionedTriples",
    "Queries",
    "Sharding",
    "Side",
    "StepBatch",
    "checked_triples",
    "derived_keys",
    "draw_between",
    "first_at_least",
    "inverse_names",
    "line_of",
    "load_graph",
    "read_columns",
    "save_graph",
    "shuffled_segments",
    "stream_key",
    "with_inverses",
]
