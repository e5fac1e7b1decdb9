"""Stores that the release before the write-ahead log of Redis and files has written, as they were left.

That release's own code made the files of this folder: five tables (`file_store.tar.gz`: seven) after five commits.

* `redis.json.gz`: what a Redis held, keys and values in base64. "whole"; "broken off" in the commit of version 6;
  "first broken off" in that of version 1; "pinned": version 4, while version 5 was committed.
* `redis_rows.npz`: the rows of version 5, tables in the order of their names: `0_ids`, `0_weights`, `0_slots`, and
  `0_looked_up`, what `looked_up` read.
* `file_store.tar.gz`, `file_rows.npz`: the same of a folder of files, with touches, admission counts and decay.
* `unclean_file_store.tar.gz`: that folder, left in the commit of version 6.
"""

from __future__ import annotations

import base64
import gzip
import json
import tarfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.rows.row_blocks import joined_rows
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace

__all__ = ["IN_ORDER", "NAMESPACE", "VERSION", "commit_of", "file_store", "fill_redis", "looked_up", "rows_of_release"]

HERE = Path(__file__).parent
NAMESPACE = "elastable"
VERSION = 5
IN_ORDER = ("cities", "people", "small", "brain", "words", "decays", "limited")
"""Tables as they were created."""
_EXTREMES = (-(2**63), -5, 2**63 - 1)


def looked_up(fixed: bool) -> np.ndarray:
    """Ids whose rows were read, int64."""
    return np.array([*range(40), *(() if fixed else _EXTREMES)], np.int64)


def commit_of(version: int, tables: Sequence[TableSpec]) -> Commit:
    """The commit of a version, as the release made it; tables in the order in which they were created."""
    random = np.random.default_rng(version)
    updates = {}
    for spec in tables:
        if spec.dtype == "int8":
            continue
        ids = random.permutation(40)[:15].astype(np.int64)
        if spec.vocabulary_size is None:
            ids = np.concatenate([ids, np.array(_EXTREMES, np.int64)])
        updates[spec.name] = TableUpdate(ids, random.normal(size=(len(ids), spec.dim)).astype(np.float32))
    return Commit(version, updates, version - 1, {}, record=b"record of version %d" % version)


@cache
def _dumps() -> dict[str, list[tuple[str, str, str | dict[str, str]]]]:
    return json.loads(gzip.decompress((HERE / "redis.json.gz").read_bytes()))


def fill_redis(url: str, state: str) -> None:
    """Writes what that release left into an empty Redis, one node or a Cluster."""
    place = RedisPlace(url)
    try:
        for key, kind, content in _dumps()[state]:
            name = base64.b64decode(key)
            if kind == "string":
                assert isinstance(content, str)
                words: list[str | bytes] = ["SET", name, base64.b64decode(content)]
            else:
                assert isinstance(content, dict)
                words = ["HSET", name, *(base64.b64decode(part) for pair in content.items() for part in pair)]
            place.topology.call([(name, tuple(words))], place.deadline())
    finally:
        place.close()


def rows_of_release(name: str) -> dict[str, np.ndarray]:
    """The arrays of `<name>_rows.npz`."""
    with np.load(HERE / f"{name}_rows.npz") as arrays:
        return dict(arrays)


def file_store(home: Path, clean: bool = True) -> Path:
    """The folder that the release wrote."""
    with tarfile.open(HERE / f"{'' if clean else 'unclean_'}file_store.tar.gz") as archive:
        archive.extractall(home, filter="data")
    return next(path for path in home.iterdir() if (path / "manifest.json").exists())


def require_as_released(store: EmbeddingStore, name: str) -> None:
    """Requires every row, slot, touch and state, and what ids read, to be what that release's store had."""
    expected = rows_of_release(name)
    for number, table in enumerate(sorted(store.specs())):
        block = joined_rows(store.specs()[table], list(store.scan(table)))
        order, state = np.argsort(block.ids), store.table_state(table)
        parts: dict[str, object] = {
            "ids": block.ids[order],
            "weights": block.weights[order],
            "slots": block.slots[order],
            "touches": None if block.touches is None else block.touches[order],
            "looked_up": store.lookup({table: looked_up(store.specs()[table].vocabulary_size is not None)})[table],
            "counts": state.admission_counts,
            "decay": state.untouched_decay,
        }
        for part, values in parts.items():
            wanted = expected.pop(f"{number}_{part}", None)
            assert (values is None) == (wanted is None), (table, part)
            if wanted is not None:
                np.testing.assert_array_equal(values, wanted, err_msg=f"{part} of {table}")
    assert not expected


def require_same_training(store: EmbeddingStore, until: int) -> None:
    """Trains the store, which is at `VERSION`, to the same bits as one that was trained from the beginning."""
    with MemoryStore(threads=1) as plain:
        specs = [store.specs()[name] for name in IN_ORDER if name in store.specs()]
        for spec in specs:
            plain.create_table(spec)
        for version in range(1, until + 1):
            commit = commit_of(version, specs)
            plain.commit(commit)
            if version > VERSION:
                store.commit(commit)
        for spec in specs:
            if spec.dtype != "int8":
                ids = {spec.name: looked_up(spec.vocabulary_size is not None)}
                np.testing.assert_array_equal(store.lookup(ids)[spec.name], plain.lookup(ids)[spec.name])
                assert store.row_count(spec.name) == plain.row_count(spec.name)
