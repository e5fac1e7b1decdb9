"""Both ways of host embeddings keep their contract, whatever the strategy and the store."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import FutureVersion, SpecConflict, StoreFailed
from elastable.embedding_store.open_store import open_store
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.host_embeddings.exchanges import EncodingBuffers, TokenBuffers
from elastable.replicas.host_embeddings.optimizer_spec import HostEmbeddingOptimizerSpec
from tests.contracts.host_table_contract import HostTableContract, Steps, Way, random_steps, train
from tests.replicas.host_embeddings.tables import create_host_table


class TestTokenBuffers(HostTableContract):
    @pytest.fixture
    def way(self) -> Way:
        return lambda: {"partition_strategy": "TOKEN", "enable_remote_buffer_embedding": True}


class TestTokenSums(HostTableContract):
    @pytest.fixture
    def way(self) -> Way:
        return lambda: {"partition_strategy": "TOKEN", "token_exchange": "sums"}


class TestEncodingBuffers(HostTableContract):
    @pytest.fixture
    def way(self) -> Way:
        return lambda: {"partition_strategy": "ENCODING"}


class TestCallbacksToMemory(HostTableContract):
    @pytest.fixture
    def way(self) -> Way:
        return lambda: {"store": MemoryStore(), "enable_remote_buffer_embedding": False}


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
