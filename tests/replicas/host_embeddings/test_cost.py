"""The cost model: its bytes are those that are sent, and its choice is the measured one."""

import numpy as np
import pytest

from elastable.embedding_store.errors import BadSpec
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.host_embeddings.optimizer_spec import HostEmbeddingOptimizerSpec
from elastable.replicas.host_embeddings.options import bytes_per_step, choose_strategy, seconds_per_step
from tests.replicas.host_embeddings.tables import create_host_table


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize(("strategy", "exchange"), [("TOKEN", "rows"), ("TOKEN", "sums"), ("ENCODING", "rows")])
@pytest.mark.parametrize(("dim", "lookups"), [(8, 24), (5, 12), (1, 36)])
def test_bytes_are_those_that_are_sent(replicas: int, strategy: str, exchange: str, dim: int, lookups: int) -> None:
    def work(group: ReplicaGroup) -> tuple[int, int]:
        table = create_host_table(
            "t", (60, dim), np.float32, strategy, HostEmbeddingOptimizerSpec(0.1), group=group, token_exchange=exchange
        )
        with table.register():
            begin = group.bytes_sent
            rows, batch = table.lookup_with_ids(np.arange(lookups))  # spread evenly over the replicas
            table.update(batch, rows)
            return group.bytes_sent - begin, bytes_per_step(strategy, 60, dim, replicas, lookups, exchange).total

    for sent, reckoned in run_threads(replicas, work):
        assert sent == reckoned


def test_bytes_by_hand() -> None:
    token = bytes_per_step("TOKEN", 1000, 8, 4, 100)
    assert (token.ids, token.rows, token.gradients) == (3 * 432, 3 * 800, 3 * 800)
    assert bytes_per_step("TOKEN", 1000, 8, 4, 100, "sums").rows == 3 * 3200
    assert bytes_per_step("ENCODING", 1000, 9, 4, 100).rows == 3 * 1200
    assert bytes_per_step("ENCODING", 2**31 + 1, 9, 4, 100).ids == 3 * 832


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


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(BadSpec, match="a strategy needs rows, columns and replicas, got 0, 1 and 2"):
        choose_strategy(0, 1, 2)
