"""Several stores as one: tables split over them, versions that all of them make, and which store each table goes to."""

from __future__ import annotations

from elastable.embedding_store.composite.composite_store import CompositeSource
from elastable.embedding_store.composite.locations import (
    Locations,
    LocationSettings,
    TensorLocation,
    TensorLocationSettings,
    plan_tables,
    read_locations,
    refuse_sharding,
    storage_of_tables,
    storage_of_url,
)
from elastable.embedding_store.composite.moving import MovedRows, move_job, repartition
from elastable.embedding_store.composite.partitioned_store import PartitionedSource, PartitionedStore, PlacedStore
from elastable.embedding_store.composite.partitions import Partition, gather_rows, global_ids, partition, split_ids
from elastable.embedding_store.composite.sharded_store import ServerWatch, ShardedStore

__all__ = [
    "CompositeSource",
    "LocationSettings",
    "Locations",
    "MovedRows",
    "Partition",
    "PartitionedSource",
    "PartitionedStore",
    "PlacedStore",
    "ServerWatch",
    "ShardedStore",
    "TensorLocation",
    "TensorLocationSettings",
    "gather_rows",
    "global_ids",
    "move_job",
    "partition",
    "plan_tables",
    "read_locations",
    "refuse_sharding",
    "repartition",
    "split_ids",
    "storage_of_tables",
    "storage_of_url",
]
