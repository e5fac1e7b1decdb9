"""Commits and repairs as a hostile client sends them: each changes everything that it says, or nothing at all."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastable.embedding_store import AdmissionSpec, EvictionSpec, InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableState, TableUpdate
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.errors import (
    BadGradient,
    BadIds,
    BadInput,
    ElastableError,
    FutureVersion,
    IdOutOfRange,
    NotFinite,
    StaleVersion,
    StoreBroken,
    TableNotFound,
)
from elastable.embedding_store.wire.pushes.remote_store import RemoteStore
from tests.contracts.store_pins import whole
from tests.contracts.store_samples import create_tables, int64
from tests.embedding_store.dictionary_model import ModelTable
from tests.embedding_store.serving import serving
from tests.plugins.seeds import examples
from tests.untyped import Parsed

pytestmark = pytest.mark.process

DIM = 2
HALF = OptimizerSpec.of("sgd", learning_rate=0.5)
DECAYS = OptimizerSpec("adamw", (("learning_rate", 0.1), ("weight_decay", 0.01)), lazy=False)
SPECS = {
    spec.name: spec
    for spec in (
        TableSpec("fixed", DIM, 20, optimizer=HALF),
        TableSpec("any", DIM, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.5)),
        TableSpec("few", DIM, optimizer=HALF, eviction=EvictionSpec(max_rows=4)),
        TableSpec("rare", DIM, optimizer=HALF, admission=AdmissionSpec(2, 1 << 10)),
        TableSpec("adamax", DIM, optimizer=OptimizerSpec("adamax", (("learning_rate", 0.1),), lazy=False)),
        TableSpec("decays", DIM, initializer=InitializerSpec("uniform", 0.5, 1.0), optimizer=DECAYS),
    )
}
MODELLED = ("fixed", "any", "rare")
NAN, INF = float("nan"), float("inf")


class Served:
    """A store behind a real port, with what it must be equal to."""

    def __init__(self, held: ExitStack) -> None:
        self.store = held.enter_context(MemoryStore(threads=1))
        self.twin = held.enter_context(MemoryStore(threads=1))
        server = held.enter_context(serving(self.store, writable=True))
        self.client = held.enter_context(RemoteStore(server.address, 60))
        self.models: dict[str, ModelTable] = {}
        self.begin()

    def begin(self) -> None:
        """Empty tables at version 0."""
        for store in (self.store, self.twin):
            for name in store.specs():
                store.drop_table(name)
            store.reset_version(0)
            create_tables(store, *SPECS.values())
        for name in MODELLED:
            self.models[name] = ModelTable(SPECS[name])

    def everything(self, store: EmbeddingStore) -> list[object]:
        read = [store.lookup({name: np.arange(20)})[name].tobytes() for name in SPECS]
        return [store.version(), whole(store, SPECS), read]

    def commit(self, commit: Commit) -> None:
        """A commit that is taken, also by the twin and the dictionaries."""
        self.client.commit(commit)
        self.twin.commit(commit)
        for name, model in self.models.items():
            if name in commit.updates:
                update = commit.updates[name]
                pairs = list(zip(update.ids.tolist(), update.gradients, strict=True))
                with np.errstate(over="ignore"):  # the square of 1e38 is infinite, here as in the store
                    model.commit(commit.version, pairs, commit.step)

    def require_equal(self) -> None:
        assert self.everything(self.store) == self.everything(self.twin)
        for name, model in self.models.items():
            ids = np.arange(20)
            expected = np.stack([model.read(one) for one in ids.tolist()])
            np.testing.assert_array_equal(self.store.lookup({name: ids})[name], expected)


@pytest.fixture(scope="module")
def module_served() -> Iterator[Served]:
    with ExitStack() as held:
        yield Served(held)


@pytest.fixture
def served(module_served: Served) -> Served:
    module_served.begin()
    return module_served


def gradients(ids: list[int], value: float = 1.0) -> TableUpdate:
    return TableUpdate(np.array(ids, np.int64), np.full((len(ids), DIM), value, np.float32))


def good(version: int, tables: tuple[str, ...] = tuple(SPECS)) -> Commit:
    return Commit(version, {name: gradients([1, 2, 3, 5 + version % 7]) for name in tables}, version - 1, {})


Spoil = Callable[[Commit], Commit]


def update(table: str, spoiled: TableUpdate) -> Spoil:
    return lambda commit: replace(commit, updates={**commit.updates, table: spoiled})


def rates(table: str, rate: float) -> Spoil:
    return lambda commit: replace(commit, learning_rates={table: rate})


HOSTILE: dict[str, tuple[Spoil, type[ElastableError]]] = {
    "last version": (lambda commit: replace(commit, version=2**63 - 1), BadInput),
    "rate NaN": (rates("fixed", NAN), BadInput),
    "rate of a table that follows": (rates("adamax", 1e300), BadInput),
    "decay of exactly all": (rates("decays", 100.00001), BadInput),
    "repeated extreme ids": (update("any", gradients([-(2**63), 7, -(2**63)])), BadIds),
    "gradient infinite": (update("rare", gradients([1], INF)), NotFinite),
    "outside": (update("fixed", gradients([20])), IdOutOfRange),
    "negative id": (update("fixed", gradients([-1])), IdOutOfRange),
    "no such table": (update("nobody", gradients([1])), TableNotFound),
    "wider": (update("any", TableUpdate(int64(1), np.ones((1, 3), np.float32))), BadGradient),
    "no columns": (update("any", TableUpdate(int64(1), np.ones((1, 0), np.float32))), BadGradient),
    "squares NaN": (update("any", replace(gradients([1]), row_squares=np.array([NAN], np.float32))), NotFinite),
    "squares below 0": (update("any", replace(gradients([1]), row_squares=np.array([-1], np.float32))), BadGradient),
}


@pytest.mark.parametrize("attack", HOSTILE)
@pytest.mark.parametrize("staged", [False, True])
def test_a_commit_that_is_refused_has_changed_nothing(served: Served, attack: str, staged: bool) -> None:
    for version in (1, 2, 3):
        served.commit(good(version))
    spoil, error = HOSTILE[attack]
    with served.client.pin() as pin:
        pinned = {name: pin.lookup({name: np.arange(20)})[name].tobytes() for name in SPECS}
        before = served.everything(served.store)
        for _ in range(2):  # a retry finds what the first attempt left
            with pytest.raises(error):
                served.client.stage(spoil(good(4)))() if staged else served.client.commit(spoil(good(4)))
        assert served.everything(served.store) == before
        served.commit(good(4))
        assert {name: pin.lookup({name: np.arange(20)})[name].tobytes() for name in SPECS} == pinned
    served.require_equal()


@pytest.mark.parametrize("logarithm", [1e308, -1e308, 1e16, NAN, INF, -INF])
def test_decay_that_no_row_can_have_is_refused_and_commits_go_on(served: Served, logarithm: float) -> None:
    served.commit(good(1))
    before = served.everything(served.store)
    for table, state in (
        ("decays", TableState(None, logarithm)),
        ("decays", TableState(np.zeros(7, np.uint8))),
        ("rare", TableState(np.zeros(3, np.uint8))),
        ("rare", TableState(None, -0.5)),
    ):
        with pytest.raises(BadInput):
            served.client.put_table_state(table, state)
    assert served.everything(served.store) == before
    served.commit(good(2))
    served.require_equal()


def test_the_largest_decay_that_is_taken_ends_no_commit() -> None:
    with create_tables(MemoryStore(threads=1), SPECS["decays"]) as store:
        for logarithm in (1e15, -1e15):
            store.put_table_state("decays", TableState(None, logarithm))
            version = store.version() + 1
            store.commit(Commit(version, {"decays": gradients([1])}, version - 1, {}))
            store.lookup({"decays": np.arange(3)})


@pytest.mark.parametrize("touches", [[-1, 1], [-(2**63), 1], [2**63 - 1, 1], [1, -1], [1, 2**32]])
def test_touches_that_no_row_can_have_are_refused(served: Served, touches: list[int]) -> None:
    served.commit(good(1))
    before = served.everything(served.store)
    block = RowBlock(
        np.arange(10, 18),
        np.ones((8, DIM), np.float32),
        np.empty((8, 0), np.float32),
        np.array([touches] * 8, np.int64),
    )
    with pytest.raises(BadInput, match=r"touches of id 10 \(position 0\)"):
        served.client.put("few", [block])
    assert served.everything(served.store) == before
    served.client.put("few", [replace(block, touches=np.array([[0, 1]] * 8, np.int64))])
    served.client.commit(good(2))
    assert served.client.row_count("few") == 4


@pytest.mark.parametrize("version", [2**63 - 1, 2**53 + 1, -1, -(2**63)])
def test_a_version_after_which_none_can_come_is_refused(served: Served, version: int) -> None:
    served.commit(good(1))
    with pytest.raises(BadInput, match="must not be negative or above"):
        served.client.reset_version(version)
    served.commit(good(2))
    served.require_equal()


def test_what_breaks_in_the_middle_nevertheless_is_said_ever_after(monkeypatch: pytest.MonkeyPatch) -> None:
    with create_tables(MemoryStore(threads=1), SPECS["any"]) as store:
        store.commit(good(1, ("any",)))

        def broken(self: MemoryTable, version: int, *how: object) -> None:
            raise ArithmeticError("this cannot be")

        with monkeypatch.context() as patched:
            patched.setattr(MemoryTable, "evict", broken)
            with pytest.raises(ArithmeticError):
                store.commit(good(2, ("any",)))
        for ask in (lambda: store.commit(good(2, ("any",))), lambda: store.lookup({"any": int64(1)})):
            with pytest.raises(StoreBroken, match="middle of a commit; restore a checkpoint: this cannot be"):
                ask()


ids = st.lists(st.integers(0, 19), max_size=8)
values = st.sampled_from([1.0, -0.5, 0.25, 3.0, 0.0]) | st.sampled_from([NAN, INF, -INF, 1e38])
steps = st.just(None) | st.sampled_from([-1, 0, 5, 2**53, 2**62, -(2**63)])
some_rates = st.dictionaries(
    st.sampled_from([*SPECS, "nobody"]), st.sampled_from([0.5, 0.0, 1e38, 1e39, NAN, INF, 150.0, -1.0]), max_size=2
)
commits = st.fixed_dictionaries(
    {
        "ahead": st.sampled_from([1, 1, 1, 1, 0, 2, -7, 2**62]),
        "staged": st.booleans(),
        "step": steps,
        "rates": st.just({}) | some_rates,
        "updates": st.dictionaries(st.sampled_from(sorted(SPECS)), st.tuples(ids, values), max_size=4),
    }
)


def is_good(made: Parsed, version: int) -> bool:
    """Whether the commit says something that can be done; written without the store."""
    step = version if made["step"] is None else made["step"]
    largest = float(np.finfo(np.float32).max)
    return (
        made["ahead"] == 1
        and 0 <= step < 2**53
        and all(abs(rate) <= largest for rate in made["rates"].values())  # no NaN is
        and all(0.01 * rate < 1 for table, rate in made["rates"].items() if table == "decays")
        and all(len(set(of)) == len(of) for of, _ in made["updates"].values())
        and all(np.isfinite(value) or not of for of, value in made["updates"].values())
    )


def refusal(client: RemoteStore, commit: Commit, staged: bool) -> ElastableError | None:
    try:
        client.stage(commit)() if staged else client.commit(commit)
    except ElastableError as error:
        return error
    return None


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(commits, min_size=1, max_size=8), pinned_at=st.integers(0, 4))
def test_any_commit_is_made_whole_or_not_at_all(module_served: Served, history: list[Any], pinned_at: int) -> None:
    served = module_served
    served.begin()
    pin: Snapshot | None = None
    seen: dict[str, bytes] = {}
    try:
        for number, made in enumerate(history):
            if number == pinned_at:
                pin = served.client.pin()
                seen = {name: pin.lookup({name: np.arange(20)})[name].tobytes() for name in SPECS}
            version = served.store.version()
            step = version if made["step"] is None else made["step"]
            updates = {name: gradients(of, value) for name, (of, value) in made["updates"].items()}
            commit = Commit(version + made["ahead"], updates, step, made["rates"])
            before = served.everything(served.store)
            if is_good(made, version) and not made["rates"].keys() & set(MODELLED):
                served.commit(commit)
                assert served.store.version() == version + 1
            else:
                refused = refusal(served.client, commit, made["staged"])
                if refused is None:
                    assert is_good(made, version), commit
                    return  # a rate that the dictionaries do not know
                assert isinstance(refused, (BadInput, StaleVersion, FutureVersion)), refused
                assert served.everything(served.store) == before
        served.require_equal()
        if pin is not None:
            assert {name: pin.lookup({name: np.arange(20)})[name].tobytes() for name in SPECS} == seen
    finally:
        if pin is not None:
            pin.close()


@pytest.mark.slow
def test_kernels_look_at_nothing_beyond_their_arrays() -> None:
    """A part of the tests, with kernels that are compiled to check every index, and kept for the next run."""
    engine = Path(__file__).parent
    compiled = engine.parents[2] / "build" / "checked-kernels"
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(compiled), "PYTEST_ADDOPTS": ""}
    names = "test_hostile_commits", "test_admission_eviction", "tiered/test_framed_reads", "../native/test_id_index"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += [*(str(engine / f"{name}.py") for name in names), "-k", "not beyond_their_arrays and not whole_or_not"]
    run = subprocess.run(command, env=environment, cwd=engine.parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4_000:] + run.stderr[-2_000:]
