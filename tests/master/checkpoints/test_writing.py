"""Checkpoints written on any file system and from any store, which of them stay; restored, and compared."""

import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import (
    AdmissionSpec,
    EvictionSpec,
    InitializerSpec,
    OptimizerSpec,
    TableSpec,
)
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, CheckpointError, ElastableError, SpecConflict, StaleVersion
from elastable.embedding_store.wire.pushes.remote_store import RemoteStore
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.master.checkpoints.checkpoint import Checkpoint, open_checkpoint
from elastable.master.checkpoints.comparing import compare_dense, compare_tables
from elastable.master.checkpoints.restoring import refuse_other_model, restore_tables, warm_start
from elastable.master.checkpoints.storage.checkpoint_files import LocalFiles
from elastable.master.checkpoints.storage.checkpoint_locations import files_at, newest_checkpoint
from elastable.master.checkpoints.storage.tensor_file import Throttle
from elastable.master.checkpoints.writing import StoredCheckpoint, to_remove
from tests.embedding_store.serving import client_service
from tests.master.checkpoints.jobs import (
    ADAGRAD,
    AGED,
    DYNAMIC,
    FIXED,
    SEEN,
    SPECS,
    commit,
    created,
    dense_of,
    progress_of,
    rows,
    saved,
    shards,
    train,
    written,
)


@pytest.fixture(params=["path", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    name = uuid.uuid4().hex
    yield {"path": str(tmp_path), "file": f"file://{tmp_path}/deep/er", "memory": f"memory://{name}/deep"}[
        request.param
    ]
    memory = fsspec.filesystem("memory")
    if memory.exists(name):
        memory.rm(name, recursive=True)


@pytest.mark.parametrize(
    ("place", "source"), [("path", "one"), ("file", "token"), ("memory", "encoding")], indirect=["place"]
)
def test_everything_comes_back_on_any_store(place: str, source: str) -> None:
    made = MemoryStore() if source == "one" else shards(2, source)
    with created(made) as store:
        train(store, 7)
        address = written(place, store)
        assert address == newest_checkpoint(place) == newest_checkpoint(address)
        found = open_checkpoint(place)
        assert (found.version, found.manifest.kind, found.address) == (7, "full", address)
        assert found.progress() == progress_of(7)
        assert found.job["job"] == "small"
        assert "secret" not in found.manifest.to_json()
        assert found.manifest.rows == len(rows(store))
        dense = found.dense()
        assert set(dense) == set(dense_of(7))
        for key, tensor in dense_of(7).items():
            np.testing.assert_array_equal(dense[key], tensor, strict=True)
        for target in (MemoryStore(), shards(3, "token"), shards(2, "encoding")):
            with target:
                restored = restore_tables(found, target)
                assert target.version() == 7
                assert sum(restored.values()) == len(rows(store))
                assert rows(target) == rows(store)


def test_a_commit_meanwhile_is_noticed(tmp_path: Path) -> None:
    class Committing(LocalFiles):
        def begin(self, name: str) -> str:
            train(store, 1)
            return super().begin(name)

    with created(MemoryStore()) as store:
        train(store, 2)
        with pytest.raises(BadInput, match="rows that are at version 3: pin them, or commit nothing meanwhile"):
            written(Committing(tmp_path), store, 2)
    assert list(tmp_path.iterdir()) == []


def test_files_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    with created(MemoryStore()) as store:
        train(store, 3)
        checkpoint = Path(written(tmp_path, store))
        held: dict[int, bytes] = {}
        for file in open_checkpoint(checkpoint).manifest.tables["fixed"].files:
            tensors = load_file(checkpoint / file)
            held.update({int(one): row.tobytes() for one, row in zip(tensors["ids"], tensors["weights"], strict=True)})
        assert held == {one: row[0] for (table, one), row in rows(store).items() if table == "fixed"}


def test_the_same_version_again_takes_the_place_of_the_first(place: str) -> None:
    with created(MemoryStore()) as store:
        train(store, 3)
        first, second = written(place, store, keep=0), written(place, store, keep=0)
        assert (Path(first).name, Path(second).name) == ("ckpt-0000000003", "ckpt-0000000003-2")
        assert newest_checkpoint(place) == second
        assert files_at(place).names() == ["ckpt-0000000003-2"]
        train(store, 1)
        assert Path(written(place, store, keep=1)).name == "ckpt-0000000004"
        assert files_at(place).names() == ["ckpt-0000000004"]


@pytest.mark.parametrize("url", ["nothing://x/y", "s4://bucket"])
def test_a_url_of_an_unknown_kind_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match=url.partition(":")[0]):
        open_checkpoint(url)


def test_nothing_there_is_said_so(place: str) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint there; expected a folder ckpt-<version>"):
        open_checkpoint(place)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with created(MemoryStore()) as store, pytest.raises(CheckpointError, match="file/deep/ckpt-0000000000 cannot be"):
        written(tmp_path / "file" / "deep", store)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_store_that_began_anew_is_not_saved(tmp_path: Path, pinned: bool) -> None:
    with created(MemoryStore(threads=1)) as store:
        train(store, 3)
        with GrpcServer("127.0.0.1:0", [client_service(store)]) as server:
            address = server.address
            remote = RemoteStore(address)
            source = remote.pin(3) if pinned else remote
    with closing(remote), MemoryStore(threads=1) as empty:
        if pinned:
            empty.reset_version(3)  # even where it has come as far, without any table
        with GrpcServer(address, [client_service(empty)]):
            wrong: type[ElastableError] = StaleVersion if pinned else BadInput
            with pytest.raises(wrong):
                written(tmp_path, source, 3)
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith("ckpt")] == []
    assert newest_checkpoint(tmp_path) is None


def name_of(version: int, again: int = 1) -> str:
    return f"ckpt-{version:010d}" + (f"-{again}" if again > 1 else "")


def chain_of(*versions: int, job: str = "j") -> StoredCheckpoint:
    return StoredCheckpoint(name_of(versions[0]), tuple(map(name_of, versions)), job)


FIVE = [chain_of(1), chain_of(2, 1), chain_of(3, 2, 1), chain_of(4), chain_of(5, 4)]
AGAIN, UPON_ITS_TWIN = (
    StoredCheckpoint(name_of(2, 2), (name_of(2, 2), *map(name_of, bases)), "j") for bases in ((1,), (2, 1))
)


@pytest.mark.parametrize(
    ("standing", "written", "keep", "stay"),
    [
        *((FIVE, name_of(5), keep, [1, 2, 3, 4, 5]) for keep in (0, 3, 9)),  # bases stay as long as they are needed
        *((FIVE, name_of(5), keep, [4, 5]) for keep in (1, 2)),
        # Damaged ones are not counted, and left alone; so are those of other jobs.
        ([chain_of(1), chain_of(2), StoredCheckpoint(name_of(3)), chain_of(4)], name_of(4), 2, [2, 3, 4]),
        ([chain_of(1), chain_of(2), chain_of(7, job="o"), chain_of(8, 7, job="o")], name_of(2), 1, [2, 7, 8]),
        # One of the same version takes the place of the older one, unless it builds upon it.
        ([chain_of(1), chain_of(2, 1), AGAIN], AGAIN.name, 0, [1, AGAIN.name]),
        ([chain_of(1), chain_of(2, 1), UPON_ITS_TWIN], UPON_ITS_TWIN.name, 1, [1, 2, AGAIN.name]),
        # The last one written stays where newer versions are there.
        ([chain_of(1), chain_of(2, 1), chain_of(8), chain_of(9)], name_of(2), 1, [1, 2, 9]),
    ],
)
def test_which_stay(standing: list[StoredCheckpoint], written: str, keep: int, stay: list[int | str]) -> None:
    gone = to_remove(standing, written, keep)
    expected = [one if isinstance(one, str) else name_of(one) for one in stay]
    assert [one.name for one in standing if one.name not in gone] == expected


@given(builds=st.lists(st.booleans(), min_size=1, max_size=12), keep=st.integers(0, 5))
def test_what_stays_can_be_restored_also_while_others_go(builds: list[bool], keep: int) -> None:
    chains: list[tuple[str, ...]] = []
    for version, increment in enumerate(builds):
        chains.append((name_of(version), *(chains[-1] if increment and chains else ())))
    standing = [StoredCheckpoint(names[0], names, "j") for names in chains]
    there = {one.name for one in standing}
    for gone in to_remove(standing, name_of(len(builds) - 1), keep):
        there.remove(gone)
        assert all(set(one.chain) <= there for one in standing if one.name in there)
    newest = [one.name for one in standing][-keep:]
    assert set(newest) <= there


def compute(seconds: float) -> None:
    """Keeps a core busy for so long, by the thread's own clock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("short", [True, False])
def test_pauses_belong_to_work_and_to_a_busy_machine(short: bool) -> None:
    pauses: list[float] = []
    restraint = Throttle(lambda: short, pauses.append)
    for seconds in (0.01, 0.03):
        with restraint.working():
            compute(seconds)
    if not short:
        assert pauses == []
        return
    assert len(pauses) == 2
    assert pauses[0] >= 0.01 * 7
    assert pauses[1] >= 0.03 * 7


# -- restored


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    with created(MemoryStore()) as store:
        train(store, 7)
        return saved(tmp_path_factory.mktemp("whole"), store)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_another_dtype(whole: Checkpoint, dtype: str) -> None:
    with MemoryStore() as store, MemoryStore() as other:
        restore_tables(whole, store)
        assert restore_tables(whole, other, dtype=dtype) == restore_tables(whole, store)
        for name, spec in other.specs().items():
            assert spec.dtype == dtype
            ids = np.arange(60)
            exact, rounded = store.lookup({name: ids})[name], other.lookup({name: ids})[name]
            assert np.abs(exact - rounded).max() <= np.abs(exact).max() / 100
            if dtype != "int8":
                ours, theirs = rows(other), rows(store)
                assert {key: row[1:] for key, row in ours.items() if key[0] == name} == {
                    key: row[1:] for key, row in theirs.items() if key[0] == name
                }
                assert other.table_state(name) == store.table_state(name)


def test_rows_that_were_put_into_a_frozen_table_wait_for_its_next_version(tmp_path: Path) -> None:
    with created(MemoryStore(), [AGED]) as store, MemoryStore() as other:
        commit(store, {"aged": [1, 2]})
        weights = np.ones((1, AGED.dim), np.float32)
        store.put("aged", [RowBlock(np.array([7]), weights, weights)])
        store.commit(Commit(2, {}, 1, {}, frozen=("aged",)))
        restore_tables(saved(tmp_path, store), other)
        assert rows(other) == rows(store)
        for each in (store, other):
            commit(each, {}, frozen=("aged",))
        assert rows(other) == rows(store)
        for ids in ([1], [2], [2], [1], [2], [1], [2]):
            for each in (store, other):
                commit(each, {"aged": ids})
            assert rows(other) == rows(store)


def test_a_table_with_another_spec_is_refused_and_keeps_its_rows(whole: Checkpoint) -> None:
    with created(MemoryStore(), [replace(FIXED, seed=4)]) as store:
        commit(store, {"fixed": [1, 2]})
        before = rows(store)
        with pytest.raises(SpecConflict, match="fixed"):
            restore_tables(whole, store)
        assert rows(store) == before


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({**{spec.name: spec for spec in SPECS}, "new": FIXED}, "the model has a table 'new', and the checkpoint"),
        ({spec.name: spec for spec in SPECS[1:]}, "the checkpoint has a table 'fixed', and the model has none"),
        (
            {**{spec.name: spec for spec in SPECS}, "fixed": replace(FIXED, dim=5, vocabulary_size=9)},
            "table 'fixed' has in the checkpoint and in the model: dim 3 and 5; vocabulary_size 500 and 9",
        ),
    ],
)
def test_another_model_is_known_by_its_table(whole: Checkpoint, tables: dict[str, TableSpec], message: str) -> None:
    refuse_other_model(whole, {spec.name: spec for spec in SPECS})
    with pytest.raises(CheckpointError, match=f"is of another model: {message}"):
        refuse_other_model(whole, tables)


def test_a_warm_start_takes_weights_and_fitting_slots(whole: Checkpoint) -> None:
    ours = (
        replace(FIXED, vocabulary_size=900, seed=5, initializer=InitializerSpec("zeros")),
        replace(DYNAMIC, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.5)),
        AGED,
        TableSpec("mine", 3, optimizer=ADAGRAD),
    )
    with created(MemoryStore(), ours) as store, MemoryStore() as other:
        restore_tables(whole, other)
        there = rows(other)
        started = warm_start(whole, store, store.specs())
        assert sorted(started) == ["aged", "dynamic", "fixed"]
        assert store.version() == 0
        here = rows(store)
        assert {key: row[0] for key, row in here.items()} == {k: row[0] for k, row in there.items() if k[0] in started}
        for key, row in here.items():
            fresh = np.full(2, 0.1, np.float32).tobytes()
            assert row[1] == (fresh if key[0] == "dynamic" else there[key][1])
        # Of version 1, the next one: as if it were touched for the first time.
        assert {np.frombuffer(row[2], np.int64)[0] for key, row in here.items() if key[0] == "aged"} == {1}


@pytest.mark.parametrize(
    ("ours", "names", "message"),
    [
        ([FIXED], ["other"], "warm start of table 'other': the checkpoint has aged, dynamic, fixed, seen"),
        ([FIXED], ["seen"], "warm start of table 'seen': the model has fixed"),
        ([replace(FIXED, dim=4)], [], "table 'fixed': its rows have 3 values in the checkpoint and 4 in the model"),
        ([replace(SEEN, admission=None, vocabulary_size=8)], [], "table 'seen': its vocabulary is any id in the ch"),
        ([replace(FIXED, vocabulary_size=8)], [], "table 'fixed': its vocabulary is 500 in the checkpoint and only 8"),
        (
            [TableSpec("x", 1)],
            [],
            "has no table of this model: its tables are aged, dynamic, fixed, seen, the model's x",
        ),
    ],
)
def test_a_warm_start_that_does_not_fit_puts_nothing(
    whole: Checkpoint, ours: list[TableSpec], names: list[str], message: str
) -> None:
    with created(MemoryStore(), ours) as store:
        with pytest.raises(CheckpointError, match=message):
            warm_start(whole, store, store.specs(), names)
        assert rows(store) == {}


def test_differences_are_reported_with_their_size(tmp_path: Path) -> None:
    with created(MemoryStore(), [FIXED, DYNAMIC]) as store:
        commit(store, {"fixed": [1, 2, 3], "dynamic": [7, 8]})
        first = saved(tmp_path, store)
        before = store.lookup({"fixed": np.array([2])})["fixed"]
        commit(store, {"fixed": [2, 30]})
        store.delete("dynamic", np.array([8]))
        created(store, [TableSpec("new", 2)])
        second = saved(tmp_path, store)
        moved = float(np.abs(store.lookup({"fixed": np.array([2])})["fixed"].astype(np.float64) - before).max())
    dynamic, fixed, new = compare_tables(first, second)
    assert (dynamic.table, dynamic.only_first, dynamic.only_second, dynamic.weights) == ("dynamic", 1, 0, 0)
    assert (fixed.only_first, fixed.only_second, fixed.weights, fixed.slots) == (0, 1, 1, 1)
    assert (fixed.largest_weight, fixed.first_ids) == (moved, (2,))
    assert new.spec == {"table": ("missing", "there")}
    iterations, variables = compare_dense(first, second)
    assert (iterations.key, iterations.difference, iterations.largest) == ("optimizer/00000", "values", 1.0)
    gap = np.abs(dense_of(1)["variables/00000"].astype(np.float64) - dense_of(2)["variables/00000"])
    assert (variables.largest, variables.values) == (float(gap.max()), 12)


TIMED = TableSpec("timed", 2, optimizer=ADAGRAD, eviction=EvictionSpec(ttl=2.0))
TOUCHED = replace(AGED, eviction=EvictionSpec(max_age=3, min_frequency=1))
SIGHTED = replace(SEEN, admission=AdmissionSpec(3, 1 << 12))


def go_on(store: EmbeddingStore, versions: int) -> None:
    """Versions at times of their own: rows are sighted, admitted, touched and evicted."""
    for version in range(store.version(), store.version() + versions):
        random = np.random.default_rng(version)
        ids = np.unique(random.integers(-30, 30, 12))
        update = TableUpdate(ids, random.normal(size=(len(ids), 2)).astype(np.float32))
        store.commit(Commit(version + 1, dict.fromkeys(store.specs(), update), version, {}, time=1000 + 0.75 * version))


@pytest.mark.parametrize(("version", "of"), [(1, 1), (4, 1), (7, 1), (5, 2)])
def test_a_restored_job_evicts_and_admits_as_if_nothing_had_happened(tmp_path: Path, version: int, of: int) -> None:
    with created(MemoryStore() if of == 1 else shards(of, "token"), [TOUCHED, SIGHTED, DYNAMIC, TIMED]) as store:
        go_on(store, version)
        checkpoint, before = saved(tmp_path, store), weights_and_slots(store)
        go_on(store, 8)
        for other in (MemoryStore(), shards(2, "token"), shards(2, "encoding"), shards(3, "token")):
            with other:
                restore_tables(checkpoint, other)
                assert weights_and_slots(other) == before
                go_on(other, 8)
                assert weights_and_slots(other) == weights_and_slots(store)


def weights_and_slots(store: EmbeddingStore) -> dict[tuple[str, int], tuple[bytes, ...]]:
    return {key: row[:2] for key, row in rows(store).items()}
