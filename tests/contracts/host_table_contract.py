"""What every way and strategy of a host embedding does, in threads; a subclass says which (`way`)."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Array, Float32
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.embedding_store.optimizers.fused import FUSED
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables.initial_values import initial_rows
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.host_embeddings.host_table import HostEmbeddingOptimizerSpec, HostTable
from tests.replicas.host_embeddings.tables import create_host_table

Way = Callable[[], dict[str, object]]
"""Arguments of `create_host_table` for one table of all replicas: strategy and store."""

Steps = Sequence[Sequence[tuple[Array, Float32]]]
"""By step and replica: ids and the gradients of their rows."""

# Rows, columns, replicas. Source: the host-embedding document's partitions (ORACLES.md).
DOCUMENTED = [(14, 64, 4), (13, 7, 4), (5, 3, 8), (1, 1, 2)]


def random_steps(rows: int, dim: int, replicas: int, steps: int, seed: int = 0) -> Steps:
    """Uneven batches, ids that repeat and ids outside the table."""
    random = np.random.default_rng(seed)

    def one() -> tuple[Array, Array]:
        ids = random.integers(-2, rows + 2, size=int(random.integers(0, 9)))
        return ids, random.normal(size=(len(ids), dim)).astype(np.float32)

    return [[one() for _ in range(replicas)] for _ in range(steps)]


def train(table: HostTable, steps: Steps) -> list[Float32]:
    """Takes the steps of this replica; returns what it looked up."""
    found = []
    with table.register():
        for step in steps:
            ids, gradients = step[table.group.rank]
            rows, batch = table.lookup_with_ids(ids)
            table.update(batch, gradients)
            found.append(rows)
    return found


def naive(spec: TableSpec, rate: float, steps: Steps, weighted: bool) -> tuple[list[list[Float32]], Float32]:
    """Everything in one loop: rows seen by step and replica, and the table at the end."""
    rows, optimizer = int(spec.vocabulary_size or 0), row_optimizer(spec.optimizer)
    weights = initial_rows(spec, np.arange(rows))
    slots = np.tile(optimizer.initial_slots(spec.dim), (rows, 1))
    seen = []
    for number, step in enumerate(steps):
        seen.append([weights[np.clip(ids, 0, rows - 1)] for ids, _ in step])
        total = sum(len(ids) for ids, _ in step)
        sums: dict[int, Float32] = {}
        for ids, gradients in step:
            scale = np.float32(len(ids) / total if weighted and total else 1)
            for given, gradient in zip(np.clip(ids, 0, rows - 1).tolist(), gradients, strict=True):
                sums[given] = sums[given] + gradient * scale if given in sums else gradient * scale
        if sums:
            where = np.array(list(sums), np.int64)
            optimizer.apply(weights, slots, UpdateBatch(where, where, np.stack(list(sums.values())), number, rate))
    return seen, weights


class HostTableContract:
    """One class a way and strategy."""

    @pytest.fixture
    def way(self) -> Way:
        raise NotImplementedError

    @pytest.mark.parametrize(("rows", "dim", "replicas"), [*DOCUMENTED, (13, 7, 1), (40, 5, 2), (14, 64, 3)])
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_the_numbers_are_those_of_a_plain_loop(
        self, way: Way, rows: int, dim: int, replicas: int, reduction: str, optimizer: str = "adagrad"
    ) -> None:
        steps, arguments = random_steps(rows, dim, replicas, 4), way()
        spec = HostEmbeddingOptimizerSpec(0.1, optimizer)

        def work(group: ReplicaGroup) -> tuple[list[Array], Array, TableSpec]:
            table = create_host_table(
                "t", (rows, dim), optimizer_spec=spec, group=group, reduction=reduction, **arguments
            )
            return train(table, steps), table.whole(), table.spec

        results = run_threads(replicas, work)
        seen, weights = naive(results[0][2], 0.1, steps, reduction == "mean")
        for rank, (found, whole, _) in enumerate(results):
            np.testing.assert_array_equal(whole, weights)
            for step, rows_found in enumerate(found):
                np.testing.assert_array_equal(rows_found, seen[step][rank])

    @pytest.mark.parametrize("name", FUSED)
    def test_every_optimizer(self, way: Way, name: str) -> None:
        self.test_the_numbers_are_those_of_a_plain_loop(way, 13, 7, 3, "mean", name.upper())

    @pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)])
    def test_indices_of_any_rank(self, way: Way, shape: tuple[int, ...]) -> None:
        arguments = way()
        rows = np.arange(40, dtype=np.float32).reshape(10, 4)
        rows[3] = -0.0

        def work(group: ReplicaGroup) -> tuple[Array, Array, Array]:
            indices = np.random.default_rng(group.rank).integers(0, 10, size=shape)
            table = create_host_table("t", (10, 4), initializer=rows, group=group, **arguments)
            with table.register():
                return indices, table.lookup(indices), table.lookup(indices.astype(np.uint8))

        for indices, found, again in run_threads(2, work):
            assert found.dtype == np.float32
            assert found.shape == (*shape, 4)
            assert found.tobytes() == again.tobytes() == rows[indices].tobytes()  # of -0.0, too

    def test_gradients_are_summed_over_the_lookups_of_a_step(self, way: Way) -> None:
        steps, arguments = random_steps(13, 7, 2, 7, seed=2), way()
        optimizer = HostEmbeddingOptimizerSpec(0.1, "adam", accumulation_factor=3)

        def work(group: ReplicaGroup) -> tuple[Array, int, TableSpec]:
            table = create_host_table("t", (13, 7), optimizer_spec=optimizer, group=group, reduction="sum", **arguments)
            train(table, steps)
            return table.whole(), table.step, table.spec

        joined: Steps = [[pair for step in steps[at : at + 3] for pair in step] for at in (0, 3)]
        results = run_threads(2, work)
        _, weights = naive(results[0][2], 0.1, joined, False)
        for whole, taken, _ in results:
            assert taken == 2  # the seventh lookup waits
            np.testing.assert_array_equal(whole, weights)

    @pytest.mark.parametrize(("replicas", "strategy"), [(1, "TOKEN"), (3, "ENCODING"), (8, "ENCODING"), (4, "TOKEN")])
    @pytest.mark.parametrize("name", ["adam", "rowwise_adagrad"])
    def test_states_continue_with_other_replicas_and_strategies(
        self, way: Way, replicas: int, strategy: str, name: str
    ) -> None:
        steps, arguments = random_steps(13, 7, 2, 8, seed=3), way()
        joined = [[(np.concatenate([ids for ids, _ in s]), np.concatenate([g for _, g in s]))] for s in steps]
        spread = [[step[0] if rank == 0 else (step[0][0][:0], step[0][1][:0]) for rank in range(8)] for step in joined]

        def table_for(group: ReplicaGroup, **more: object) -> HostTable:
            optimizer = HostEmbeddingOptimizerSpec(0.1, name, accumulation_factor=2)
            return create_host_table("t", (13, 7), optimizer_spec=optimizer, group=group, reduction="sum", **more)

        def there(group: ReplicaGroup) -> dict[str, Array]:
            table = table_for(group, **arguments)
            train(table, steps[:5])
            return table.state()

        def here(group: ReplicaGroup) -> dict[str, Array]:
            table = table_for(group, partition_strategy=strategy)
            table.restore(states[0])
            train(table, spread[5:])
            return table.state()

        def at_once(group: ReplicaGroup) -> dict[str, Array]:
            table = table_for(group)
            train(table, joined)
            return table.state()

        states = run_threads(2, there)
        (whole,) = run_threads(1, at_once)
        assert (states[0]["pending/lookups"], states[0]["step"]) == (1, 2)
        assert (whole["pending/lookups"], len(whole["pending/ids"]), whole["step"]) == (0, 0, 4)
        for state in run_threads(replicas, here):
            assert state.keys() == whole.keys() == states[0].keys()
            for key, values in whole.items():
                np.testing.assert_array_equal(state[key], values, key)

    def test_an_index_out_of_range_is_raised_on_every_replica_and_changes_nothing(self, way: Way) -> None:
        arguments = way()

        def work(group: ReplicaGroup) -> str:
            table = create_host_table("t", (5, 3), initializer="ones", group=group, **arguments)
            with table.register():
                with pytest.raises(IdOutOfRange) as caught:
                    table.lookup([0, 5 if group.rank else 1], clip_indices=False)
                assert table.lookup([[-7, 5]]).tolist() == [[[1.0] * 3] * 2]  # clipped, and the group goes on
            return str(caught.value)

        message = (
            "host embedding 't': index 5 at position 1 of rank 1 is outside 0 <= index < 5, and clip_indices=False"
        )
        assert run_threads(2, work) == [message, message]

    def test_replicas_with_different_options_are_refused_with_the_difference(self, way: Way) -> None:
        arguments = way()

        def work(group: ReplicaGroup) -> str:
            with pytest.raises(BadInput) as caught:
                create_host_table("t", (5, 3 + group.rank // 2), group=group, **arguments)
            return str(caught.value)

        message = "host embedding 't': replicas differ in shape: rank 0 has [5, 3], rank 2 has [5, 4]"
        assert run_threads(3, work) == [message] * 3

    def test_untrained_embeddings_do_not_change(self, way: Way) -> None:
        arguments = way()

        def work(group: ReplicaGroup) -> None:
            for name, optimizer in (("a", None), ("b", HostEmbeddingOptimizerSpec(0, "adam"))):
                table = create_host_table(
                    name, (4, 3), optimizer_spec=optimizer, initializer="ones", group=group, **arguments
                )
                train(table, random_steps(4, 3, 2, 3))
                np.testing.assert_array_equal(table.whole(), np.ones((4, 3)))
                assert table.step == 0

        run_threads(2, work)
