"""Table specs as protobuf messages, and back."""

from __future__ import annotations

from dataclasses import asdict

from elastable.embedding_store.contract.spec import (
    AdmissionSpec,
    EvictionSpec,
    InitializerSpec,
    OptimizerSpec,
    ShardOrigin,
    TableSpec,
)
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.v1 import store_pb2

__all__ = ["OWNER_KEY", "SERVER_SERVICE", "STORE_SERVICE", "spec_from_message", "spec_to_message"]

STORE_SERVICE: str = store_pb2.DESCRIPTOR.services_by_name["EmbeddingStore"].full_name
"""Full name of the service on the wire; of a store server's own calls `SERVER_SERVICE`."""

SERVER_SERVICE: str = store_pb2.DESCRIPTOR.services_by_name["StoreServer"].full_name

OWNER_KEY = "elastable-owner-bin"
"""Metadata in which the owner of a store server shows the secret of its claim."""


def spec_to_message(spec: TableSpec) -> store_pb2.TableSpec:
    """The message that says what `spec` says."""
    return store_pb2.TableSpec(
        name=spec.name,
        dim=spec.dim,
        vocabulary_size=spec.vocabulary_size,
        dtype=spec.dtype,
        initializer=store_pb2.Initializer(kind=spec.initializer.kind, a=spec.initializer.a, b=spec.initializer.b),
        seed=spec.seed,
        optimizer=store_pb2.Optimizer(
            name=spec.optimizer.name,
            hyperparameters=dict(spec.optimizer.hyperparameters),
            keras_config=spec.optimizer.keras_config,
            dense=not spec.optimizer.lazy,
        ),
        admission=None if spec.admission is None else store_pb2.Admission(**asdict(spec.admission)),
        eviction=None if spec.eviction is None else store_pb2.Eviction(**asdict(spec.eviction)),
        ids="" if spec.ids == "int64" else spec.ids,
        origin=None if spec.origin == ShardOrigin() else _origin_message(spec.origin),
    )


def spec_from_message(message: store_pb2.TableSpec) -> TableSpec:
    """The spec that a message says; what it leaves out takes the spec's defaults.

    Raises:
        BadSpec: no table can be so.
    """
    default = TableSpec(name="default", dim=1)
    return TableSpec(
        name=message.name,
        dim=message.dim,
        vocabulary_size=message.vocabulary_size if message.HasField("vocabulary_size") else None,
        dtype=message.dtype or default.dtype,
        initializer=_initializer(message.initializer) if message.HasField("initializer") else default.initializer,
        seed=message.seed,
        optimizer=_optimizer(message) if message.HasField("optimizer") else default.optimizer,
        admission=_admission(message.admission) if message.HasField("admission") else None,
        eviction=_eviction(message.eviction) if message.HasField("eviction") else None,
        ids=message.ids or default.ids,
        origin=_origin(message.origin) if message.HasField("origin") else default.origin,
    )


def _initializer(message: store_pb2.Initializer) -> InitializerSpec:
    return InitializerSpec(message.kind, message.a, message.b)


def _optimizer(message: store_pb2.TableSpec) -> OptimizerSpec:
    optimizer = message.optimizer
    if not optimizer.name:
        raise BadSpec(f'table {message.name!r}: its optimizer has no name; use "sgd", "adagrad", "adam", ...')
    pairs = tuple(sorted(optimizer.hyperparameters.items()))
    return OptimizerSpec(optimizer.name, pairs, optimizer.keras_config, lazy=not optimizer.dense)


def _admission(message: store_pb2.Admission) -> AdmissionSpec:
    return AdmissionSpec(message.sightings, message.counters or AdmissionSpec(1).counters)


def _eviction(message: store_pb2.Eviction) -> EvictionSpec:
    return EvictionSpec(
        max_age=message.max_age if message.HasField("max_age") else None,
        min_frequency=message.min_frequency if message.HasField("min_frequency") else None,
        max_rows=message.max_rows if message.HasField("max_rows") else None,
        every=message.every or 1,
        ttl=message.ttl if message.HasField("ttl") else None,
    )


def _origin_message(origin: ShardOrigin) -> store_pb2.ShardOrigin:
    return store_pb2.ShardOrigin(
        id_stride=origin.id_stride,
        id_offset=origin.id_offset,
        first_column=origin.first_column,
        table=None if origin.table is None else spec_to_message(origin.table),
        shards=origin.shards,
    )


def _origin(message: store_pb2.ShardOrigin) -> ShardOrigin:
    table = spec_from_message(message.table) if message.HasField("table") else None
    return ShardOrigin(message.id_stride or 1, message.id_offset, message.first_column, table, message.shards or 1)
