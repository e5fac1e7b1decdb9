"""Keras' own optimizers on tables whose columns lie apart: the same bits, or refused by name."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest

from elastable.embedding_store.composite import PartitionedStore
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.errors import Unsupported
from elastable.embedding_store.optimizers.base import KERAS_BLOCK
from elastable.master.keras.keras_block import canonical_config


@keras.saving.register_keras_serializable(package="test")
class RowNorm(keras.optimizers.SGD):
    """Divides each row's gradient by its length: columns cannot be updated apart."""

    def update_step(
        self, gradient: keras.KerasTensor, variable: keras.Variable, learning_rate: keras.KerasTensor
    ) -> None:
        length = keras.ops.sqrt(keras.ops.sum(gradient * gradient, axis=-1, keepdims=True)) + 1e-6
        super().update_step(gradient / length, variable, learning_rate)


def table(optimizer: keras.optimizers.Optimizer, rate: float = 0.01) -> TableSpec:
    config = json.dumps(canonical_config(optimizer, rate, None))
    return TableSpec("t", 7, None, optimizer=OptimizerSpec(KERAS_BLOCK, (("learning_rate", rate),), config))


def partitioned(strategy: str) -> PartitionedStore:
    return PartitionedStore([MemoryStore(threads=1) for _ in range(3)], strategy)


def trained(store: EmbeddingStore, spec: TableSpec) -> np.ndarray:
    with store:
        store.create_table(spec)
        random = np.random.default_rng(4)
        for version in range(1, 4):
            ids = random.choice(1500, 1100, replace=False)  # more than one block of Keras' own
            update = TableUpdate(ids, random.normal(size=(1100, 7)).astype(np.float32))
            store.commit(Commit(version, {"t": update}, version - 1, {}))
        return store.lookup({"t": np.arange(1500)})["t"]


def test_the_same_bits_by_either_strategy() -> None:
    spec = table(keras.optimizers.Adam())
    plain = trained(MemoryStore(threads=1), spec)
    for strategy in ("token", "encoding"):
        np.testing.assert_array_equal(trained(partitioned(strategy), spec), plain, err_msg=strategy)


def test_an_optimizer_that_joins_columns_needs_whole_rows() -> None:
    spec = table(RowNorm())
    for refused in (spec, table(RowNorm(), 1e-7), table(RowNorm(), 0.0)):
        with partitioned("encoding") as store, pytest.raises(Unsupported, match=r"'t'.*'RowNorm' updates whole rows"):
            store.create_table(refused)
    np.testing.assert_array_equal(trained(partitioned("token"), spec), trained(MemoryStore(threads=1), spec))
