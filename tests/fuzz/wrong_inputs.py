"""Input that must be refused, by an oracle that does not ask the code: each case is right, or has one known flaw."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.shards.server_contract import PushTerms, RowPush, Slices
from elastable.embedding_store.tables.table_update import IndexedSlices
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.channels.status_codes import ERROR_KEY, error_class
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE
from elastable.embedding_store.wire.pushes.push_messages import row_push_frames
from elastable.jobs.options import TrainOptions
from elastable.master.api import Push, SyncPushId
from elastable.master.push_check import Expected, TensorSpec, check_finite, check_push
from elastable.worker.readers.batch.ragged import RaggedArray
from elastable.worker.readers.numpy_reader import NumpyReader
from tests.embedding_store.serving import client_service
from tests.fuzz.calls import WAIT_S, served
from tests.fuzz.mutator import Mutator
from tests.fuzz.target import Finding, Target

SIZE, DIM = 20, 2
SPEC = TableSpec("fixed", DIM, SIZE, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.5))
_RIGHT = 0.4
_NOT_FINITE = (float("nan"), float("inf"), float("-inf"))

Flawed: TypeAlias = "tuple[Any, str]"
"""A value, and what is wrong with it; "": nothing."""


@dataclass(frozen=True, slots=True)
class Attempt:
    where: str  # the face that is called
    call: Callable[[], object]  # calls it
    flaw: str = field(default="")  # what is wrong with what it is given; "": nothing


class WrongInputs(Target):
    share = 30

    @abstractmethod
    def made(self, m: Mutator) -> Attempt:
        """The next case."""

    def case(self, m: Mutator) -> str | None:
        attempt = self.made(m)
        try:
            attempt.call()
        except ElastableError as error:
            if not attempt.flaw:
                raise Finding(f"{attempt.where}: what is right is refused: {error}") from error
            raise
        if attempt.flaw:
            raise Finding(f"{attempt.where}: accepted, with {attempt.flaw}")
        return None


def flawed(m: Mutator, right: Any, flaws: Mapping[str, Callable[[], Any]]) -> Flawed:
    """The right value, or one with a flaw."""
    if m.chance(_RIGHT):
        return right, ""
    name = m.choice(sorted(flaws))
    return flaws[name](), name


def ids_of(m: Mutator, size: int | None = SIZE, count: int | None = None) -> Flawed:
    """Ids `[n]` of a table as programs have them: of any dtype, in lists or arrays."""
    count = 1 + m.small(4) if count is None else count
    right = [m.random.randrange(size or 1_000) for _ in range(count)]
    place = m.random.randrange(count)

    def put(value: object, kind: npt.DTypeLike = object) -> Any:
        return np.array([*right[:place], value, *right[place + 1 :]], kind)

    flaws: dict[str, Callable[[], Any]] = {
        "a fraction": lambda: put(m.choice((0.5, 1.7, 1e-3, 2.0**40 + 0.5)), "float64"),
        "a value that is not finite": lambda: put(m.choice(_NOT_FINITE), m.choice(("float32", "float64"))),
        "a float that its dtype may have rounded": lambda: m.choice(
            (put(2.0**24, "float32"), put(2.0**53, "float64"), put(2048, "float16"), put(-(2.0**60), "float64"))
        ),
        "a null": lambda: put(None),
        "a text": lambda: put("1"),
        "booleans": lambda: np.array(right) > 3,
        "a masked value": lambda: np.ma.masked_array(right, np.arange(count) == place),
        "an id above 2**63 - 1": lambda: put(2**63 + m.small(9), "uint64"),
    }
    if size is not None:
        flaws["an id outside"] = lambda: put(m.choice((-1, size, size + 1, 2**62, -(2**63))), "int64")
    kind = m.choice(("int64", "int32", "uint8", "uint64", ">i8", "float64", "float32", "list"))
    return flawed(m, right if kind == "list" else np.array(right).astype(kind), flaws)


def gradient_of(m: Mutator, count: int) -> Flawed:
    """float32 `[count, DIM]`."""
    right = np.array([[m.random.uniform(-1, 1) for _ in range(DIM)] for _ in range(count)], np.float32)

    def put() -> Any:
        right[m.random.randrange(count), m.random.randrange(DIM)] = m.choice(_NOT_FINITE)
        return right

    shapes = {
        "a gradient that is not finite": put,
        "a gradient of doubles": lambda: right.astype(np.float64),
        "a gradient with a row too many": lambda: np.ones((count + 1, DIM), np.float32),
        "a gradient with a column too many": lambda: np.ones((count, DIM + 1), np.float32),
    }
    return flawed(m, right, shapes)


def one_of(m: Mutator, *parts: Callable[[bool], Flawed]) -> tuple[list[Any], str]:
    """The parts of an input, of which at most one has a flaw; each gets whether it must be right."""
    chosen, flaw = m.random.randrange(len(parts)), ""
    values = []
    for place, part in enumerate(parts):
        while True:
            value, found = part(place != chosen)
            if place == chosen or not found:
                break
        flaw = flaw or found
        values.append(value)
    return values, flaw


class LibraryInputs(WrongInputs):
    name = "wrong-library"

    def open(self) -> None:
        self.store = self.held.enter_context(MemoryStore(1))
        self.table = self.store.table(SPEC)

    def made(self, m: Mutator) -> Attempt:
        return m.choice((self._lookup, self._bags, self._update, self._delete, self._put))(m)

    def _lookup(self, m: Mutator) -> Attempt:
        ids, flaw = ids_of(m)
        return Attempt("table.lookup", lambda: self.table.lookup(ids), flaw)

    def _delete(self, m: Mutator) -> Attempt:
        ids, flaw = ids_of(m)
        return Attempt("table.delete", lambda: self.table.delete(ids), flaw)

    def _bags(self, m: Mutator) -> Attempt:
        count = 1 + m.small(4)
        middle = m.small(count)
        (ids, offsets, weights, combiner), flaw = one_of(
            m,
            lambda right: ids_of(m, count=count),
            lambda right: flawed(
                m,
                [0, middle, count],
                {
                    "offsets that do not begin with 0": lambda: [1, count],
                    "offsets that end too late": lambda: [0, count + 1],
                    "offsets that end too early": lambda: [0, count - 1],
                    "offsets that descend": lambda: [0, count, middle - 1, count],
                    "offsets of floats": lambda: [0.0, float(count)],
                },
            ),
            lambda right: flawed(
                m,
                np.ones(count, np.float32),
                {
                    "a weight too many": lambda: np.ones(count + 1, np.float32),
                    "weights of doubles": lambda: np.ones(count),
                },
            ),
            lambda right: flawed(m, "sum", {"an unknown combiner": lambda: m.choice(("max", "", "Sum"))}),
        )
        return Attempt(
            "table.lookup of bags",
            lambda: self.table.lookup(ids, combiner=combiner, offsets=np.asarray(offsets), weights=weights),
            flaw,
        )

    def _update(self, m: Mutator) -> Attempt:
        count = 1 + m.small(4)
        (ids, gradient, optimizer, step), flaw = one_of(
            m,
            lambda right: ids_of(m, count=count),
            lambda right: gradient_of(m, count),
            lambda right: flawed(
                m,
                ("adagrad", {"learning_rate": m.random.uniform(0, 1)}),
                {
                    "a rate that is not finite": lambda: ("adagrad", {"learning_rate": m.choice(_NOT_FINITE)}),
                    "a rate above float32": lambda: ("adagrad", {"learning_rate": 1e39}),
                    "a rate that is no number": lambda: ("adagrad", {"learning_rate": m.choice((None, "0.1"))}),
                    "another optimizer": lambda: ("sgd", {}),
                    "another hyperparameter": lambda: ("adagrad", {"epsilon": 0.5}),
                },
            ),
            lambda right: flawed(
                m, m.choice((None, 3)), {"a step that none is": lambda: m.choice((-1, 2**53, 0.5, float("nan")))}
            ),
        )
        name, parameters = optimizer
        return Attempt(
            "table.update",
            lambda: self.table.update(OptimizerSpec.of(name, **parameters), IndexedSlices(gradient, ids), step=step),
            flaw,
        )

    def _put(self, m: Mutator) -> Attempt:
        count = 1 + m.small(4)
        ids = np.array(m.random.sample(range(SIZE), count), np.int64)
        outside = np.where(np.arange(count) == 0, SIZE, ids)
        ones, wide = np.ones((count, DIM), np.float32), np.ones((count, DIM + 1), np.float32)
        block, flaw = flawed(
            m,
            RowBlock(ids, ones, ones),
            {
                "an id outside": lambda: RowBlock(outside, ones, ones),
                "ids of 32 bits": lambda: RowBlock(ids.astype(np.int32), ones, ones),
                "weights of another width": lambda: RowBlock(ids, wide, ones),
                "slots of another width": lambda: RowBlock(ids, ones, wide),
                "touches below 0": lambda: RowBlock(ids, ones, ones, np.full((count, 2), -1)),
            },
        )
        return Attempt("table.put", lambda: self.table.put([block]), flaw)


class ServedInputs(WrongInputs):
    """A store behind gRPC, whose client has checked nothing."""

    name = "wrong-calls"
    share = 20

    def open(self) -> None:
        self.store = self.held.enter_context(MemoryStore(1))
        self.store.create_table(SPEC)
        _, channel = served(self.held, client_service(self.store))
        self._commits = channel.stream_unary(f"/{STORE_SERVICE}/PushRows", None, None)
        self._lookups = channel.stream_stream(f"/{STORE_SERVICE}/Lookup", None, None)

    def made(self, m: Mutator) -> Attempt:
        return self._commit(m) if m.chance(0.7) else self._lookup(m)

    def _commit(self, m: Mutator) -> Attempt:
        count = 2 + m.small(3)
        ids, ones = np.array(m.random.sample(range(SIZE), count), np.int64), np.ones((count, DIM), np.float32)
        version = self.store.version() + 1
        bad = np.where(np.arange(count)[:, np.newaxis] == 1, np.float32(m.choice(_NOT_FINITE)), ones)

        def commit(
            of: str = "fixed", ids: Any = ids, rows: Any = ones, at: int = version, step: int = 0, **rates: float
        ) -> Commit:
            return Commit(at, {of: TableUpdate(ids, rows)}, step, rates)

        sent, flaw = flawed(
            m,
            commit(fixed=0.25),
            {
                "an id that appears twice": lambda: commit(ids=np.where(np.arange(count) == 1, ids[0], ids)),
                "an id outside": lambda: commit(ids=np.where(np.arange(count) == 0, m.choice((-1, SIZE)), ids)),
                "a gradient that is not finite": lambda: commit(rows=bad),
                "a gradient with a column too many": lambda: commit(rows=np.ones((count, DIM + 1), np.float32)),
                "a rate that is not finite": lambda: commit(fixed=m.choice(_NOT_FINITE)),
                "an unknown table": lambda: commit("none"),
                "a version that is not the next": lambda: commit(at=version + 1),
                "a version of the past": lambda: commit(at=0),
                "a step below 0": lambda: commit(step=-1),
            },
        )
        (table, update), *_ = sent.updates.items()
        terms = PushTerms(sent.version, sent.step, sent.learning_rates, summed=True)
        parts = ({table: Slices(update.ids, update.gradients)},)
        push = RowPush("", 0, 1, parts, m.bytes(16).hex(), terms)
        return Attempt("PushRows", lambda: self._done(self._commits, row_push_frames(push)), flaw)

    def _lookup(self, m: Mutator) -> Attempt:
        count = 1 + m.small(4)
        ids = np.array([m.random.randrange(SIZE) for _ in range(count)], np.int64)
        (table, number, body), flaw = flawed(
            m,
            ("fixed", count, ids.tobytes()),
            {
                "an id outside": lambda: ("fixed", count, np.full(count, m.choice((-1, SIZE, 2**62))).tobytes()),
                "an unknown table": lambda: ("none", count, ids.tobytes()),
                "a body that is too short": lambda: ("fixed", count + 1, ids.tobytes()),
                "a body that is too long": lambda: ("fixed", count - 1, ids.tobytes()),
                "a number of ids below 0": lambda: ("fixed", -1, b""),
            },
        )
        header = store_pb2.LookupHeader()
        header.tables.add(table=table, count=number)
        sent = [store_pb2.LookupRequest(header=header).SerializeToString()]
        sent.append(store_pb2.LookupRequest(body=body).SerializeToString())
        return Attempt("Lookup", lambda: self._done(self._lookups, iter(sent)), flaw)

    def _done(self, call: Callable[..., Any], frames: Iterator[bytes]) -> None:
        try:
            reply = call(frames, WAIT_S)
            for _ in reply if not isinstance(reply, bytes) else ():
                pass
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call):
                raise
            kind = error_class(str(dict(error.trailing_metadata() or ()).get(ERROR_KEY, "")))
            raise (kind or Finding)(f"{error.code()}: {error.details()}") from error


class PushInputs(WrongInputs):
    name = "wrong-pushes"

    expected = Expected(
        (TensorSpec("kernel", (DIM, 1), np.dtype(np.float32)),),
        (TensorSpec("mean", (1,), np.dtype(np.float32)),),
        tables={"fixed": SPEC},
    )

    def made(self, m: Mutator) -> Attempt:
        count = 1 + m.small(4)
        (ids, rows, dense, states, table), flaw = one_of(
            m,
            lambda right: flawed(
                m,
                np.array([m.random.randrange(SIZE) for _ in range(count)], np.int64),
                {
                    "an id outside": lambda: np.full(count, m.choice((-1, SIZE)), np.int64),
                    "ids of 32 bits": lambda: np.zeros(count, np.int32),
                    "ids of two dimensions": lambda: np.zeros((count, 1), np.int64),
                },
            ),
            lambda right: gradient_of(m, count),
            lambda right: self._tensor(m, (DIM, 1)),
            lambda right: self._tensor(m, (1,)),
            lambda right: flawed(m, "fixed", {"an unknown table": lambda: "none"}),
        )
        push = Push(SyncPushId(0, 0), 1, (dense,), {table: Slices(ids, rows)}, (states,))

        def take() -> None:
            check_push(push, self.expected)
            check_finite(push, self.expected)

        return Attempt("a push", take, flaw)

    def _tensor(self, m: Mutator, shape: tuple[int, ...]) -> Flawed:
        ones = np.ones(shape, np.float32)
        return flawed(
            m,
            ones,
            {
                "a tensor that is not finite": lambda: ones * np.float32(m.choice(_NOT_FINITE)),
                "a tensor of another shape": lambda: np.ones((*shape, 1), np.float32),
                "a tensor of doubles": lambda: ones.astype(np.float64),
            },
        )


class RecordInputs(WrongInputs):
    name = "wrong-records"

    def open(self) -> None:
        import keras

        from elastable.worker.rows.model_inputs import exact_leaf

        self.exact = exact_leaf
        self.inputs = {dtype: keras.Input((), dtype=dtype, name="item") for dtype in ("int64", "int32")}

    def made(self, m: Mutator) -> Attempt:
        return m.choice((self._column, self._narrow, self._arrays, self._indices))(m)

    def _column(self, m: Mutator) -> Attempt:
        column, flaw = ids_of(m, None, 4)
        while flaw in ("booleans", "a text"):  # an input casts booleans, and TensorFlow refuses texts
            column, flaw = ids_of(m, None, 4)
        array = column if isinstance(column, np.ndarray) else np.array(column)

        def read() -> None:
            (leaf,) = NumpyReader(array).take(np.arange(4))
            if m.chance(0.3):
                leaf = RaggedArray(leaf, np.array([0, 1, 1, 4]))
            found = self.exact(leaf, self.inputs["int64"], "arrays")
            values: Any = found.values if isinstance(found, RaggedArray) else found
            if not flaw and not np.array_equal(values, array.astype(np.int64)):
                raise Finding(f"ids {array!r} have become {values!r}")

        return Attempt("an integer input", read, flaw)

    def _narrow(self, m: Mutator) -> Attempt:
        kind = m.choice(("int64", "float64", "uint64"))
        column, flaw = flawed(
            m,
            np.array([0, 2**31 - 1], kind),
            {"an id beyond int32": lambda: np.array([0, m.choice((2**31, 2**32 + 5, 2**52))], kind)},
        )
        return Attempt("an input of int32", lambda: self.exact(column, self.inputs["int32"], "arrays"), flaw)

    def _arrays(self, m: Mutator) -> Attempt:
        records = 1 + m.small(4)
        x = np.ones((records, 2), np.float32)
        given, flaw = flawed(
            m,
            (x, np.ones(records), np.ones(records)),
            {
                "a target too many": lambda: (x, np.ones(records + 1)),
                "features of two lengths": lambda: ({"a": x, "b": np.ones(records + 1)},),
                "no records": lambda: (np.ones((0, 2)),),
                "weights without targets": lambda: (x, None, np.ones(records)),
                "a list of numbers": lambda: ([1.0, 2.0],),
                "objects": lambda: (np.array([object()] * records, object),),
                "a key that is no name": lambda: ({1: x},),
                "a time": lambda: (np.zeros(records, "M8[s]"),),
            },
        )
        return Attempt("NumpyReader", lambda: NumpyReader(*given), flaw)

    def _indices(self, m: Mutator) -> Attempt:
        reader = NumpyReader(np.arange(5))
        indices, flaw = flawed(
            m,
            np.array([m.small(4), 0]),
            {
                "a record that there is not": lambda: np.array([m.choice((-1, 5, 2**40))]),
                "floats as record numbers": lambda: np.array([1.0]),
                "record numbers of two dimensions": lambda: np.zeros((1, 1), np.int64),
            },
        )
        return Attempt("reader.take", lambda: reader.take(indices), flaw)


class LayerInputs(WrongInputs):
    name = "wrong-layers"
    share = 10

    def open(self) -> None:
        from elastable.worker.layers.embedding import Embedding

        self.layers = {SIZE: Embedding(SIZE, DIM, name="fixed"), None: Embedding(None, DIM, name="any")}

    def made(self, m: Mutator) -> Attempt:
        size = m.choice((SIZE, None))
        layer = self.layers[size]
        ids, flaw = ids_of(m, size)
        while flaw == "a text":  # a layer without a vocabulary takes them
            ids, flaw = ids_of(m, size)
        if m.chance(0.5):
            return Attempt("layer.read_rows", lambda: layer.read_rows(ids), flaw)
        return Attempt("layer()", lambda: layer(ids), flaw)


_OPTIONS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "epochs": ((None, 1, 7), (0, -1, 1.5, "2", True, float("nan"))),
    "micro_batch_size": ((1, 256), (0, -1, 2.5, None)),
    "grads_to_wait": ((None, 1, 9), (0, -3, 1.5)),
    "mode": (("sync", "async"), ("Sync", "", None, 3)),
    "average": (("mean", "records", "batches", "sum"), ("median", "", None)),
    "not_finite": (("refuse", "skip"), ("ignore", "", None)),
    "workers": ((1, 3), (0, -1, 0.5, None)),
    "evaluate_every": ((0, 5), (-1, 0.5, None)),
    "checkpoint_every": ((0, 5), (-1, None)),
    "keep": ((0, 3), (-1, None)),
    "full_every": ((1, 5), (0, None)),
    "lease_s": ((0.5, 60, 3600.0), (0, -1.0, float("nan"), float("inf"), "60", None)),
    "backup_after_s": ((None, 0.5), (0, -1.0, float("nan"), float("inf"))),
    "deadline_s": ((5.0, 60), (0, -1.0, float("nan"), None)),
    "staleness_bound": ((None, 0, 3), (-1, 0.5)),
    "intra_op_threads": ((1, 4), (0, -1, None)),
    "seed": ((0, -5, 2**40), (0.5, None, "1")),
    "shuffle": ((True, False), (None, 1, "yes")),
    "store": (("memory", "redis://localhost:6379"), (None, 3)),
}
_CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "--rerun without --resume": {"rerun": True},
    "--resume with nothing to resume from": {"resume": True, "store": "memory"},
    "--warm-tables without --warm-start": {"warm_tables": ("users",)},
    "--stores with --store": {"stores": ("a:1",), "store": "redis://localhost"},
    "more store servers than are started here": {"stores": ("65",)},
}


class OptionInputs(WrongInputs):
    name = "wrong-options"

    def made(self, m: Mutator) -> Attempt:
        names = m.random.sample(sorted(_OPTIONS), 1 + m.small(3))
        given = {name: m.choice(_OPTIONS[name][0]) for name in names}
        wrong = names[0]
        changes, flaw = flawed(
            m,
            {},
            {
                "a wrong value": lambda: {wrong: m.choice(_OPTIONS[wrong][1])},
                "a contradiction": lambda: m.choice(list(_CONTRADICTIONS.values())),
            },
        )
        given |= changes
        return Attempt(
            "elastable train", lambda: TrainOptions(Path("model.py"), **given), flaw and f"{flaw}: {changes}"
        )
