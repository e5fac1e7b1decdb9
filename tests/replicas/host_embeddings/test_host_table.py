"""Host tables: registration, what is refused, and states that do not fit."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import (
    BadGradient,
    BadIds,
    BadInput,
    BadSpec,
    IdOutOfRange,
    StoreFailed,
    Unsupported,
)
from elastable.embedding_store.tables.initial_values import initial_rows
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.grouping import CommGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.host_embeddings.exchanges import Callbacks, TokenBuffers
from elastable.replicas.host_embeddings.optimizer_spec import (
    HostEmbeddingOptimizerSpec,
    HostEmbeddingSGDGAOptimizerSpec,
)
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
@pytest.mark.parametrize("remote_buffers", [True, False])
def test_rows_come_back_in_the_tables_dtype(dtype: str, remote_buffers: bool) -> None:
    number = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    given = np.arange(6, dtype=np.float32).reshape(3, 2) / 3
    spec = HostEmbeddingOptimizerSpec(0.5)
    table = create_host_table("t", (3, 2), dtype, "TOKEN", spec, given, enable_remote_buffer_embedding=remote_buffers)
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


def test_callbacks_and_remote_buffers_by_name() -> None:
    """The name of the option of TensorFlow's IPUConfig."""

    def trained(**arguments: object) -> tuple[object, Array]:
        table = create_host_table(
            "t", (5, 3), optimizer_spec=HostEmbeddingOptimizerSpec(0.1, "adam"), seed=3, **arguments
        )
        with table.register():
            for step in range(3):
                rows, batch = table.lookup_with_ids([1, step, 4])
                table.update(batch, np.ones_like(rows))
        return table._exchange.__class__, table.whole()

    ways = {
        name: trained(**arguments)  # type: ignore[arg-type]
        for name, arguments in {
            "default": {},
            "buffers": {"enable_remote_buffer_embedding": True},
            "alone": {"enable_remote_buffer_embedding": False},
            "store": {"enable_remote_buffer_embedding": False, "store": MemoryStore()},
            "store alone": {"store": MemoryStore()},
        }.items()
    }
    assert [kind for kind, _ in ways.values()] == [TokenBuffers, TokenBuffers, Callbacks, Callbacks, Callbacks]
    for _, table in ways.values():
        np.testing.assert_array_equal(table, ways["default"][1])
    with pytest.raises(
        BadSpec, match=r"enable_remote_buffer_embedding=True: rows are .* leave store out, or give False"
    ):
        trained(enable_remote_buffer_embedding=True, store=MemoryStore())

    def without_a_store(group: ReplicaGroup) -> None:
        with pytest.raises(BadSpec, match=r"callbacks need a store that all 2 replicas reach, such as store="):
            create_host_table("t", (5, 3), group=group, enable_remote_buffer_embedding=False)

    run_threads(2, without_a_store)


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
    assert HostEmbeddingOptimizerSpec(0.5).get_learning_rate() == 0.5
    spec = HostEmbeddingSGDGAOptimizerSpec(0.5, 2)
    assert (spec.optimizer.name, spec.get_accumulation_factor()) == ("sgd", 2)


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
