"""A partitioned store holds, to the bit, the rows and slots of one that is not split."""

import shutil
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store import EmbeddingStore, MemoryStore, TableUpdate
from elastable.embedding_store.contract.spec import EvictionSpec, InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.errors import Unsupported
from elastable.embedding_store.optimizers.fused import FUSED
from tests.contracts.store_history import History, Program, programs
from tests.contracts.store_samples import commit, create_tables, rows_by_id
from tests.embedding_store.store_kinds import KINDS
from tests.file_stores import quick_folder
from tests.plugins.seeds import examples

VARIANTS = {
    "nesterov": OptimizerSpec.of("sgd", momentum=0.9, nesterov=True),
    "amsgrad": OptimizerSpec.of("adam", amsgrad=True),
    "centered rmsprop": OptimizerSpec.of("rmsprop", centered=True, momentum=0.5),
}
OPTIMIZERS = {**{name: OptimizerSpec.of(name, learning_rate=0.05) for name in sorted(FUSED)}, **VARIANTS}
EDGES = [-(2**63), -(2**63) + 1, -(2**32), -7, -1, 0, 1, 2**31, 2**63 - 2, 2**63 - 1]


def train(store: EmbeddingStore, specs: list[TableSpec]) -> None:
    random = np.random.default_rng(8)
    create_tables(store, *specs)
    for _ in range(4):
        updates = {}
        for spec in specs:
            known = np.arange(50) if spec.vocabulary_size else np.array([*EDGES, *range(100, 130)], np.int64)
            ids = random.choice(known, 25, replace=False)
            updates[spec.name] = TableUpdate(ids, random.normal(size=(25, spec.dim)).astype(np.float32))
        commit(store, updates)


SCALED = ("glorot_uniform", "glorot_normal", "he_uniform", "he_normal", "truncated_normal")
NORMAL = InitializerSpec("normal", 0, 0.1)
TABLES: dict[str, list[TableSpec]] = {
    "every optimizer": [
        TableSpec(f"{number}/{dim}", dim, size, initializer=NORMAL, optimizer=optimizer)
        for number, optimizer in enumerate(OPTIMIZERS.values())
        for dim, size in ((1, None), (7, 50), (37, None))
    ],
    "narrow weights, rounded": [
        TableSpec(f"{name}/{dtype}/{dim}", dim, size, dtype, optimizer=OPTIMIZERS[name])
        for name in ("sgd", "adam", "rowwise_adagrad")
        for dtype in ("float16", "bfloat16")
        for dim, size in ((1, None), (9, 50), (37, None))
    ],
    "initial values that depend on the shape": [
        TableSpec(kind, 10, 50, initializer=InitializerSpec(kind, 0.0, 0.1 * (kind[0] == "t"))) for kind in SCALED
    ],
    "a budget of rows": [TableSpec("t", 7, eviction=EvictionSpec(max_rows=30, every=2), optimizer=OPTIMIZERS["adam"])],
}


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("kind", ["token 3", "encoding 4", "encoding of token"])
def test_a_split_table_is_a_whole_one(kind: str, tables: str, tmp_path: Path) -> None:
    specs = TABLES[tables]
    with KINDS[kind](tmp_path) as split, MemoryStore(threads=1) as plain:
        if tables == "a budget of rows" and "token" in kind:
            with pytest.raises(Unsupported, match="max_rows"):
                train(split, specs)
            return
        for store in (split, plain):
            train(store, specs)
        for spec in specs:
            name, ids = spec.name, np.arange(50) if spec.vocabulary_size else np.array([*EDGES, *range(90, 140)])
            np.testing.assert_array_equal(split.lookup({name: ids}, 4)[name], plain.lookup({name: ids})[name])
            assert rows_by_id(split, name, 9) == rows_by_id(plain, name)
            assert (split.row_count(name), split.specs()[name]) == (plain.row_count(name), spec)
        assert tables != "a budget of rows" or plain.row_count("t") == 30


@settings(max_examples=examples(16))
@given(programs(), st.permutations(sorted(KINDS)))
def test_any_history_while_rows_move_from_kind_to_kind(program: Program, kinds: list[str]) -> None:
    folder, following = quick_folder(), cycle(kinds)

    def make() -> EmbeddingStore:
        return KINDS[next(following)](folder)

    History(make(), make, but=("byte", "few")).play(program)  # which cannot be split by column, or by id
    shutil.rmtree(folder)
