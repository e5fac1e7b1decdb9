"""Host tables: registration, the contract of both ways, files, the cost model, and what is refused."""

from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.spec import InitializerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import (
    BadGradient,
    BadIds,
    BadInput,
    BadSpec,
    CheckpointError,
    FutureVersion,
    IdOutOfRange,
    SpecConflict,
    StoreFailed,
    Unsupported,
)
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.tables.initial_values import initial_rows
from elastable.replicas.groups.group import CommGroup, ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.host_embeddings.exchanges import Callbacks, EncodingBuffers, TokenBuffers
from elastable.replicas.host_embeddings.host_embedding import (
    bytes_per_step,
    choose_strategy,
    load_host_embedding,
    save_host_embedding,
    seconds_per_step,
)
from elastable.replicas.host_embeddings.host_table import (
    HostEmbeddingOptimizerSpec,
    HostEmbeddingSGDGAOptimizerSpec,
    HostTable,
)
from tests.contracts.host_table_contract import HostTableContract, Steps, Way, random_steps, train
from tests.replicas.host_embeddings.tables import create_host_table
from tests.untyped import Keywords


def test_a_name_is_registered_once_at_a_time() -> None:
    one, other = create_host_table("users", (4, 3)), create_host_table("users", (4, 3))
    with one.register():
        with pytest.raises(BadInput, match="host embedding 'users' is registered already"), other.register():
            pass
        with pytest.raises(BadInput, match="registered already"), one.register():
            pass
        assert one.lookup([1]).shape == (1, 3)
    with pytest.raises(ZeroDivisionError), one.register():
        raise ZeroDivisionError
    with other.register():
        assert other.lookup([1]).shape == (1, 3)


def test_a_subgroup_shares_the_names_of_its_group() -> None:
    def work(group: ReplicaGroup) -> object:
        table = create_host_table("users", (4, 3), group=group)
        again = create_host_table("users", (4, 3), group=group.subgroup(CommGroup("all")))
        with table.register(), pytest.raises((BadInput, StoreFailed)) as caught, again.register():
            pass
        with again.register():
            return type(caught.value)

    assert run_threads(3, work) == [BadInput] * 3


def test_a_refusal_on_one_replica_is_raised_on_all() -> None:
    def work(group: ReplicaGroup) -> tuple[int, int]:
        alone = group.subgroup(CommGroup("consecutive", 1))
        table = create_host_table("users", (4, 3), group=group)
        mine = create_host_table("users", (4, 3), group=alone)
        if group.rank:
            with mine.register(), pytest.raises(BadInput, match="registered already"), table.register():
                pass
        else:
            with pytest.raises(StoreFailed, match="rank 1: BadInput: host embedding 'users'"), table.register():
                pass
        with table.register():
            return table.lookup([0]).shape

    assert run_threads(2, work) == [(1, 3)] * 2


def test_lookups_and_updates_need_a_registration() -> None:
    table = create_host_table("t", (4, 3), optimizer_spec=HostEmbeddingOptimizerSpec(0.1))
    with pytest.raises(BadInput, match="'t' is looked up without being registered"):
        table.lookup([1])
    with table.register():
        rows, batch = table.lookup_with_ids([1])
    with pytest.raises(BadInput, match="'t' is updated without being registered"):
        table.update(batch, rows)


def test_mismatched_indices_and_gradients_are_refused() -> None:
    table = create_host_table("t", (4, 3), optimizer_spec=HostEmbeddingOptimizerSpec(0.1))
    with table.register():
        with pytest.raises(BadIds, match=r"'t': id 1\.5 is no integer"):
            table.lookup([1.5])
        with pytest.raises(BadIds, match="bool"):
            table.lookup(np.array([True]))
        with pytest.raises(IdOutOfRange, match="index -1 at position 2 of rank 0 is outside 0 <= index < 4"):
            table.lookup([[0, 3], [-1, 4]], clip_indices=False)
        large = np.array([2, 2**64 - 1], np.uint64)  # to the nearest inside, also where int64 has no such number
        np.testing.assert_array_equal(table.lookup(large), table.lookup([2, 3]))
        with pytest.raises(BadIds, match=r"id 18446744073709551615 at position 1 is above 2\*\*63 - 1"):
            table.lookup(large, clip_indices=False)
        rows, batch = table.lookup_with_ids([[0, 3]])
        with pytest.raises(BadGradient, match=r"float32 \[2, 3\]"):
            table.update(batch, rows[:, :1])
        with pytest.raises(BadGradient, match="float64"):
            table.update(batch, rows.astype(np.float64))
    assert table.step == 0


def test_the_mean_weighs_replicas_by_their_batches() -> None:
    """A mean loss over 3 samples and one over 1 have the joined batch's mean loss at weights 3/4 and 1/4."""

    def work(group: ReplicaGroup) -> list[list[float]]:
        table = create_host_table(
            "t", (2, 1), optimizer_spec=HostEmbeddingOptimizerSpec(1.0), initializer="zeros", group=group
        )
        samples = 1 if group.rank else 3
        with table.register():
            _, batch = table.lookup_with_ids(np.full((samples, 2), group.rank))
            table.update(batch, np.full((samples, 2, 1), 1 / (2 * samples), np.float32))
        return table.whole().tolist()

    assert run_threads(2, work) == [[[-0.75], [-0.25]]] * 2


def test_learning_rates_follow_a_schedule() -> None:
    table = create_host_table(
        "t", (2, 1), optimizer_spec=HostEmbeddingOptimizerSpec(lambda step: 1 / (1 + step)), initializer="zeros"
    )
    with table.register():
        for _ in range(3):
            rows, batch = table.lookup_with_ids([1])
            table.update(batch, np.ones_like(rows))
    np.testing.assert_allclose(table.whole(), np.array([[0.0], [-(1 + 1 / 2 + 1 / 3)]]), rtol=1e-6)
    bad = create_host_table("t", (2, 1), optimizer_spec=HostEmbeddingOptimizerSpec(lambda step: float("nan")))
    with bad.register(), pytest.raises(BadSpec, match="learning_rate must be a finite number"):
        bad.update(batch, np.ones_like(rows))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("called_back", [False, True])
def test_rows_come_back_in_the_tables_dtype(dtype: str, called_back: bool) -> None:
    number = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    given = np.arange(6, dtype=np.float32).reshape(3, 2) / 3
    spec = HostEmbeddingOptimizerSpec(0.5)
    table = create_host_table("t", (3, 2), dtype, "TOKEN", spec, given, store=MemoryStore() if called_back else None)
    with table.register():
        rows = table.lookup([[1, 2]])
        assert (rows.dtype, rows.shape) == (number, (1, 2, 2))
        np.testing.assert_array_equal(rows[0], given.astype(number)[1:])
        whole = table.whole()
        assert (whole.dtype, whole.shape) == (number, (3, 2))
        np.testing.assert_array_equal(whole, given.astype(number))
        _, batch = table.lookup_with_ids([1])
        table.update(batch, np.ones((1, 2), np.float32))
        moved, near = table.whole()[1].astype(np.float32), 0.01 if number.itemsize == 2 else 1e-7
        np.testing.assert_allclose(moved, given[1] - 0.5, atol=near)
    table.close()


def test_a_store_is_called_back_and_without_one_rows_are_in_the_replicas_own_memory() -> None:
    def trained(store: MemoryStore | None) -> tuple[object, Array]:
        table = create_host_table(
            "t", (5, 3), optimizer_spec=HostEmbeddingOptimizerSpec(0.1, "adam"), seed=3, store=store
        )
        with table.register():
            for step in range(3):
                rows, batch = table.lookup_with_ids([1, step, 4])
                table.update(batch, np.ones_like(rows))
        return table._exchange.__class__, table.whole()

    (own, rows), (called, same) = trained(None), trained(MemoryStore())
    assert (own, called) == (TokenBuffers, Callbacks)
    np.testing.assert_array_equal(rows, same)


def test_initial_rows_are_the_initializers() -> None:
    drawn = create_host_table("t", (6, 3), initializer=InitializerSpec("normal", 0, 1), seed=7)
    np.testing.assert_array_equal(drawn.whole(), initial_rows(drawn.spec, np.arange(6)))
    given = np.arange(6).reshape(3, 2)
    np.testing.assert_array_equal(create_host_table("t", (3, 2), initializer=given).whole(), given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (4,)}, r"shape must be \[rows, columns\], two positive integers, got \(4,\)"),
        ({"shape": (4, 0)}, "two positive integers"),
        ({"shape": (4.0, 1)}, "two positive integers"),
        ({"dtype": np.float64}, "dtype 'float64'; known dtypes are float32, float16, bfloat16"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"partition_strategy": "ROW"}, "partition_strategy 'ROW'; known are TOKEN, ENCODING, AUTO"),
        ({"reduction": "max"}, "reduction 'max'; known are mean, sum"),
        ({"optimizer_spec": "sgd"}, "must be a HostEmbeddingOptimizerSpec"),
        ({"initializer": "glorot"}, "initializer kind 'glorot'"),
        ({"initializer": np.ones((4, 2))}, r"numbers \[4, 3\], got float64 \[4, 2\]"),
        ({"initializer": len}, "initializer must be the name of a kind"),
        ({"name": "a b"}, "table name 'a b'"),
    ],
)
def test_invalid_arguments_are_refused(arguments: Keywords, message: str) -> None:
    with pytest.raises(BadSpec, match=message):
        create_host_table(**{"name": "t", "shape": (4, 3), **arguments})


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: HostEmbeddingOptimizerSpec("0.1"), "learning_rate must be a finite number"),  # type: ignore[arg-type]
        (lambda: HostEmbeddingOptimizerSpec(-0.1), "learning_rate must be a finite number"),
        (lambda: HostEmbeddingOptimizerSpec(float("inf")), "learning_rate must be a finite number"),
        (lambda: HostEmbeddingOptimizerSpec(0.1, "sgdd"), "'sgdd': known optimizers are adadelta, adagrad, adam,"),
        (lambda: HostEmbeddingOptimizerSpec(0.1, "keras"), "optimizer 'keras': known optimizers are"),
        (lambda: HostEmbeddingOptimizerSpec(0.1, "adam", beta_3=0.5), "unknown hyperparameter 'beta_3'"),
        (lambda: HostEmbeddingSGDGAOptimizerSpec(0.1, 0), "accumulation_factor must be .* at least 1, got 0"),
    ],
)
def test_invalid_optimizers_are_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(BadSpec, match=reason):
        make()
    with pytest.raises(Unsupported, match="lazy=False"):
        create_host_table("t", (4, 3), np.float16, optimizer_spec=HostEmbeddingOptimizerSpec(0.1, "adam", lazy=False))


def test_names_and_defaults_of_the_original() -> None:
    """Source: `HostEmbeddingOptimizerSpec` of TensorFlow for the IPU: a rate alone is SGD."""
    assert HostEmbeddingOptimizerSpec(0.5).optimizer.name == "sgd"
    assert HostEmbeddingOptimizerSpec(0.5).rate_at(0) == 0.5
    spec = HostEmbeddingSGDGAOptimizerSpec(0.5, 2)
    assert (spec.optimizer.name, spec.accumulation_factor) == ("sgd", 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": np.zeros((4, 2), np.float32)}, r"'weights' must be float32 \[4, 3\], got float32 \[4, 2\]"),
        ({"weights": np.zeros((4, 3))}, r"'weights' must be float32 \[4, 3\], got float64"),
        ({"slots/momentum": None}, "has no 'slots/momentum'"),
        ({"slots/other": np.zeros(1)}, "has an unknown 'slots/other'"),
        ({"pending/ids": np.array([4])}, "pending/ids must ascend"),
    ],
)
def test_states_that_do_not_fit_are_refused_and_change_nothing(
    change: dict[str, Array] | dict[str, None], message: str
) -> None:
    table = create_host_table("t", (4, 3), optimizer_spec=HostEmbeddingOptimizerSpec(0.1, "sgd", momentum=0.9))
    state = table.state()
    broken = {name: values for name, values in {**state, **change}.items() if values is not None}
    with pytest.raises(BadInput, match=message):
        table.restore(broken)
    for name, values in table.state().items():
        np.testing.assert_array_equal(values, state[name])


def test_a_bad_state_of_one_replica_is_raised_on_all() -> None:
    def work(group: ReplicaGroup) -> None:
        table = create_host_table("t", (4, 3), group=group)
        state = table.state()
        if group.rank:
            del state["step"]
        with pytest.raises((BadInput, StoreFailed), match="has no 'step'"):
            table.restore(state)

    run_threads(2, work)


WAYS: dict[str, Way] = {
    "token buffers": lambda: {"partition_strategy": "TOKEN"},
    "encoding buffers": lambda: {"partition_strategy": "ENCODING"},
    "callbacks to memory": lambda: {"store": MemoryStore()},
}


class TestWays(HostTableContract):
    @pytest.fixture(params=WAYS)
    def way(self, request: pytest.FixtureRequest) -> Way:
        return WAYS[request.param]


class TestCallbacksToRedis(HostTableContract):
    @pytest.fixture
    def way(self, redis_url: str) -> Iterator[Way]:
        with open_store(redis_url) as store:
            yield lambda: {"partition_strategy": "TOKEN", "store": store}


@settings(max_examples=25)
@given(
    rows=st.integers(1, 30),
    dim=st.integers(1, 9),
    replicas=st.integers(1, 5),
    strategy=st.sampled_from(["TOKEN", "ENCODING"]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    optimizer=st.sampled_from([("adam", True), ("adam", False), ("sgd", True), ("rowwise_adagrad", True)]),
    seed=st.integers(0, 99),
)
def test_sums_over_replicas_are_one_process_with_the_joined_batch(
    rows: int, dim: int, replicas: int, strategy: str, dtype: str, optimizer: tuple[str, bool], seed: int
) -> None:
    steps = random_steps(rows, dim, replicas, 3, seed)
    joined: Steps = [[(np.concatenate([ids for ids, _ in s]), np.concatenate([g for _, g in s]))] for s in steps]
    name, lazy = optimizer[0], optimizer[1] or dtype != "float32"  # narrow rows cannot follow steps

    def run(replicas: int, strategy: str, steps: Steps) -> list[bytes]:
        def work(group: ReplicaGroup) -> bytes:
            trained = HostEmbeddingOptimizerSpec(0.1, name, lazy=lazy)
            table = create_host_table(
                "t", (rows, dim), dtype, strategy, trained, group=group, reduction="sum", seed=seed
            )
            train(table, steps)
            return b"".join(values.tobytes() for values in table.state().values())

        return run_threads(replicas, work)

    assert run(replicas, strategy, steps) == run(1, "TOKEN", joined) * replicas


def test_rows_are_partitioned_as_in_the_original() -> None:
    """Source: the host-embedding document: row i on shard i mod n at i // n; ceil(dim / n) columns each."""
    spec = TableSpec("t", 7, 13)

    def work(group: ReplicaGroup) -> tuple[list[int], object, int, int]:
        token, encoding = TokenBuffers(group, spec), EncodingBuffers(group, spec)
        return token.kept_ids(group.rank).tolist(), encoding.columns_of(group.rank), token.dim, encoding.dim

    assert run_threads(4, work) == [
        ([0, 4, 8, 12], slice(0, 2), 7, 2),
        ([1, 5, 9], slice(2, 4), 7, 2),
        ([2, 6, 10], slice(4, 6), 7, 2),
        ([3, 7, 11], slice(6, 7), 7, 1),
    ]


def test_replicas_with_different_stores_are_refused() -> None:
    def work(group: ReplicaGroup) -> str:
        optimizer = HostEmbeddingOptimizerSpec(0.1)
        table = create_host_table("t", (4, 3), optimizer_spec=optimizer, group=group, store=_Impatient())
        with pytest.raises((FutureVersion, StoreFailed)) as caught:
            train(table, random_steps(4, 3, 2, 1))
        return str(caught.value)

    messages = run_threads(2, work)
    assert messages[1].startswith("host embedding 't': the store of rank 1 is at version 0, and rank 0 has committed 1")
    assert messages[0] == f"rank 1: FutureVersion: {messages[1]}"


class _Impatient(MemoryStore):
    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        return super().wait_for_version(version, 0.0)


def test_a_store_that_fails_one_replica_fails_all() -> None:
    with MemoryStore() as good, MemoryStore() as bad:
        bad.create_table(TableSpec("t", 9, 4))

        def work(group: ReplicaGroup) -> tuple[object, str]:
            with pytest.raises((SpecConflict, StoreFailed)) as caught:
                create_host_table("t", (4, 3), group=group, store=bad if group.rank else good)
            table = create_host_table("u", (4, 3), group=group, store=bad if group.rank else good)
            if group.rank:
                bad.drop_table("u")
            with table.register(), pytest.raises(Exception, match="no table 'u'") as lost:
                table.lookup([1])
            return type(caught.value), str(lost.value)

        first, second = run_threads(2, work)
        assert first == (StoreFailed, "rank 1: TableNotFound: no table 'u'; tables here: t")
        assert second[0] is SpecConflict


def table_for(group: ReplicaGroup | None = None, strategy: str = "TOKEN", dim: int = 7) -> HostTable:
    optimizer = HostEmbeddingOptimizerSpec(0.1, "adam", accumulation_factor=2)
    return create_host_table("t", (13, dim), partition_strategy=strategy, optimizer_spec=optimizer, group=group)


def test_files_are_read_by_any_number_of_replicas(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"

    def write(group: ReplicaGroup) -> dict[str, Array]:
        table = table_for(group)
        train(table, random_steps(13, 7, 3, 5))
        save_host_embedding(table, path)
        save_host_embedding(table, path)  # in place of the first
        return table.state()

    def read(group: ReplicaGroup) -> dict[str, Array]:
        table = table_for(group, "ENCODING")
        load_host_embedding(table, path)
        return table.state()

    written = run_threads(3, write)[0]
    tensors = load_file(path)  # of the safetensors library
    assert tensors.keys() == written.keys()
    for state in (*run_threads(4, read), tensors):
        for name, values in written.items():
            np.testing.assert_array_equal(state[name], values)
    assert [file.name for file in tmp_path.iterdir()] == ["t.safetensors"]


def test_files_that_cannot_be_read_are_refused_and_change_nothing(tmp_path: Path) -> None:
    path, table = tmp_path / "t.safetensors", table_for()
    save_host_embedding(table, path)
    before, content = table.state(), path.read_bytes()
    damaged = bytearray(content)
    damaged[-5] ^= 1
    for broken, message in ((damaged, "is damaged"), (content[:50], "cannot be read"), (b"", "0 bytes are no")):
        path.write_bytes(broken)
        with pytest.raises(CheckpointError, match=message):
            load_host_embedding(table, path)
    with pytest.raises(CheckpointError, match="No such file"):
        load_host_embedding(table, tmp_path / "other.safetensors")
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"'pending/gradients' must be float32 \[n, 8\], got float32 \[0, 7\]"):
        load_host_embedding(table_for(dim=8), path)
    for name, values in table.state().items():
        np.testing.assert_array_equal(values, before[name])


def test_a_failed_write_is_raised_on_every_replica(tmp_path: Path) -> None:
    def work(group: ReplicaGroup) -> object:
        with pytest.raises((CheckpointError, StoreFailed), match="host embedding 't' cannot be written to") as caught:
            save_host_embedding(table_for(group), tmp_path / "missing" / "t.safetensors")
        return type(caught.value)

    assert run_threads(2, work) == [CheckpointError, StoreFailed]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", ["TOKEN", "ENCODING"])
@pytest.mark.parametrize(("dim", "lookups"), [(8, 24), (5, 12), (1, 36)])
def test_bytes_are_those_that_are_sent(replicas: int, strategy: str, dim: int, lookups: int) -> None:
    def work(group: ReplicaGroup) -> tuple[int, int]:
        table = create_host_table("t", (60, dim), np.float32, strategy, HostEmbeddingOptimizerSpec(0.1), group=group)
        with table.register():
            begin = group.bytes_sent
            rows, batch = table.lookup_with_ids(np.arange(lookups))  # spread evenly over the replicas
            table.update(batch, rows)
            ids, values = bytes_per_step(strategy, 60, dim, replicas, lookups)
            return group.bytes_sent - begin, ids + 2 * values

    for sent, reckoned in run_threads(replicas, work):
        assert sent == reckoned


def test_bytes_by_hand() -> None:
    assert bytes_per_step("TOKEN", 1000, 8, 4, 100) == (3 * 432, 3 * 800)
    assert bytes_per_step("ENCODING", 1000, 9, 4, 100) == (3 * 432, 3 * 1200)
    assert bytes_per_step("ENCODING", 2**31 + 1, 9, 4, 100)[0] == 3 * 832


@pytest.mark.parametrize(
    ("rows", "dim", "replicas", "chosen"),
    [
        (4_000_000, 32, 4, "TOKEN"),  # as of a language model: t >> e, far beyond the caches
        (1_000_000, 64, 4, "TOKEN"),
        (1000, 1024, 4, "ENCODING"),  # as of a game: few rows, wide
        (1000, 2048, 2, "ENCODING"),
        (1000, 7, 4, "TOKEN"),  # columns that do not divide
        (1000, 1, 2, "TOKEN"),
        (1000, 64, 1, "TOKEN"),
    ],
)
def test_the_choice(rows: int, dim: int, replicas: int, chosen: str) -> None:
    assert choose_strategy(rows, dim, replicas) == chosen
    tables = run_threads(
        replicas, lambda group: create_host_table("t", (rows // 1000, dim), partition_strategy="AUTO", group=group)
    )
    assert {table.strategy for table in tables} == {choose_strategy(rows // 1000, dim, replicas)}
    if replicas > 1:
        seconds = {of: seconds_per_step(of, rows, dim, replicas, 4096) for of in ("TOKEN", "ENCODING")}
        assert min(seconds, key=lambda of: seconds[of]) == chosen


def test_optimizers_that_look_across_columns_are_split_by_token() -> None:
    def work(group: ReplicaGroup) -> list[str]:
        optimizers = (HostEmbeddingOptimizerSpec(0.1, name) for name in ("adagrad", "rowwise_adagrad"))
        return [
            create_host_table("t", (9, 64), np.float32, "AUTO", optimizer, group=group).strategy
            for optimizer in optimizers
        ]

    assert run_threads(2, work) == [["ENCODING", "TOKEN"]] * 2


def test_sizes_without_a_strategy_are_refused() -> None:
    with pytest.raises(BadSpec, match="a strategy needs rows, columns and replicas, got 0, 1 and 2"):
        choose_strategy(0, 1, 2)
