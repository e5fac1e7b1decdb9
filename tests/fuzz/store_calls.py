"""The calls of the Store service."""

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableState, TableUpdate
from elastable.embedding_store.contract.spec import AdmissionSpec, EvictionSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.optimizers.fused import FUSED
from elastable.embedding_store.store_reader import HeldServers
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.frames import FrameReader
from elastable.embedding_store.wire.messages.store_messages import (
    blocks_from_frames,
    ids_from_frames,
    record_frames,
    record_from_frames,
    reset_from_frames,
    spec_to_message,
)
from elastable.embedding_store.wire.pushes.push_messages import row_push_from_frames
from elastable.embedding_store.wire.pushes.remote_store import RemoteStore
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore
from tests.embedding_store.serving import client_service
from tests.fuzz.calls import WAIT_S, Call, CallTarget, Seed, class_of, plain, served
from tests.fuzz.mutator import Mutator
from tests.fuzz.target import Finding
from tests.master.checkpoints.jobs import rows

SPECS = {
    spec.name: spec
    for spec in (
        TableSpec("fixed", 2, 20, optimizer=OptimizerSpec.of("sgd", learning_rate=0.5)),
        TableSpec("any", 3, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.5)),
        TableSpec("half", 4, dtype="float16", optimizer=OptimizerSpec.of("adam", learning_rate=0.1)),
        TableSpec("bytes", 4, dtype="int8", optimizer=OptimizerSpec.of("sgd", learning_rate=0.1)),
        TableSpec("few", 2, optimizer=OptimizerSpec.of("sgd"), eviction=EvictionSpec(max_rows=4)),
        TableSpec("rare", 2, optimizer=OptimizerSpec.of("sgd"), admission=AdmissionSpec(2, 64)),
        TableSpec("follows", 2, 30, optimizer=OptimizerSpec("adam", (("learning_rate", 0.1),), lazy=False)),
    )
}
CALM = TableSpec("calm", 3, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.5))
"""A table that no call of a fuzzer names: its rows may not change."""

_NAMES = [*SPECS, "any", "new", "new/one"]
_TOKENS = [bytes([number]) * 16 for number in range(4)]
_WORDS = {
    "kind": ["zeros", "ones", "constant", "uniform", "normal", "truncated_normal", "variance_scaling"],
    "dtype": ["float32", "float16", "bfloat16", "int8"],
    "ids": ["", "farmhash64", "int64"],
    "keras_config": [
        "",
        "{}",
        '{"class_name": "Adam", "config": {}}',
        '{"class_name": "Dense", "config": {"units": 4}}',
    ],
}
_OPTIMIZERS = [*FUSED, "keras"]
_HYPERPARAMETERS = ["learning_rate", "beta_1", "beta_2", "epsilon", "weight_decay", "momentum", "rho"]


def store_words(m: Mutator, field: FieldDescriptor) -> object:
    if field.type == FieldDescriptor.TYPE_STRING:
        return m.text(_strings(field))
    if field.type == FieldDescriptor.TYPE_BYTES and m.chance(0.7):
        return m.choice(_TOKENS)
    if field.name == "lease_s":
        return m.choice((0.01, 0.1, 0.5, 0.0, -1.0, 3601.0, float("nan")))
    if field.name == "vocabulary_size" and m.chance(0.9):
        return m.choice((-1, 0, 1, 5, 1000))
    if field.name in ("id_stride", "id_offset", "shards", "sightings", "max_age", "max_rows"):
        return m.small(3)
    return None


def _strings(field: FieldDescriptor) -> list[str]:
    of = field.containing_type.full_name.rpartition(".")[2]  # type: ignore[union-attr]
    if of == "Optimizer" and field.name == "name":
        return _OPTIMIZERS
    if of == "HyperparametersEntry":
        return _HYPERPARAMETERS
    return _WORDS.get(field.name, _NAMES)


def _spec(m: Mutator) -> Seed:
    return store_pb2.CreateTableRequest(spec=spec_to_message(m.choice(list(SPECS.values())))), b""


def _ids(m: Mutator, spec: TableSpec, unique: bool = True) -> Array:
    top = spec.vocabulary_size or 40
    ids = m.random.sample(range(top), m.small(6)) if unique else [m.random.randrange(top) for _ in range(m.small(6))]
    return np.array(ids, np.int64)


def _floats(m: Mutator, count: int, dim: int) -> Array:
    return np.array([m.random.uniform(-1, 1) for _ in range(count * dim)], np.float32)


def _lookup(m: Mutator) -> Seed:
    header, body = store_pb2.LookupHeader(), b""
    for name in m.random.sample(sorted(SPECS), m.small(3)):
        ids = _ids(m, SPECS[name], unique=False)
        header.tables.add(table=name, count=len(ids))
        body += ids.tobytes()
    if m.chance(0.2):
        header.version = m.small(3)
    if m.chance(0.2):
        header.pin = m.choice(_TOKENS)
    return header, body


def _rows(m: Mutator) -> Seed:
    spec = m.choice(list(SPECS.values()))
    ids = _ids(m, spec)
    header = store_pb2.RowIdsHeader(table=spec.name, count=len(ids))
    match m.small(5):
        case 0:
            header.block_rows = m.small(9)
        case 1:
            header.state, header.table = True, "rare"
    if header.block_rows or header.state:
        header.count, ids = 0, ids[:0]
    return header, ids.tobytes()


def _block(m: Mutator) -> Seed:
    from elastable.embedding_store.optimizers.registry import row_optimizer

    if m.chance(0.2):
        return store_pb2.RowBlockHeader(table="rare", state=store_pb2.TableState(counters=64)), m.bytes(64)
    spec = m.choice(list(SPECS.values()))
    ids = _ids(m, spec)
    width = row_optimizer(spec.optimizer).slot_width(spec.dim)
    header = store_pb2.RowBlockHeader(table=spec.name, count=len(ids), dim=spec.dim, slot_width=width)
    body = ids.tobytes() + _floats(m, len(ids), spec.dim).tobytes() + np.abs(_floats(m, len(ids), width)).tobytes()
    if spec.eviction is not None:
        header.touches = True
        body += np.array([[m.small(3), m.small(3)] for _ in ids], np.int64).tobytes()
    return header, body


class StoreCalls(CallTarget):
    """A server of a writable store, as `elastable serve` runs it."""

    name = "store-calls"
    share = 300
    service = store_pb2.DESCRIPTOR.services_by_name["Store"]

    def open(self) -> None:
        self.store = self.held.enter_context(SharedMemoryStore(2))
        service = client_service(self.store)
        new = {name: plain(class_of(self.service.methods_by_name[name]), store_words) for name in service.handlers}
        self.calls = {**new, **STORE_CALLS}
        server, self.channel = served(self.held, service)
        self.client = self.held.enter_context(RemoteStore(server.address, WAIT_S))
        self.client.create_table(CALM)
        calm = np.arange(5, dtype=np.int64)
        weights, slots = np.ones((5, 3), np.float32), np.ones((5, 3), np.float32)
        self.client.put("calm", [RowBlock(calm, weights, slots)])
        self._begin_anew()

    def words(self, m: Mutator, field: FieldDescriptor) -> object:
        """As `store_words`; the version that would be right is often among the versions."""
        if field.name == "version" and m.chance(0.5):
            return self.store.version() + m.small(1)
        return store_words(m, field)

    def check(self) -> None:
        """A good client trains here as in a store of its own, to the bit; and the calm table is as it was."""
        block = next(self.client.scan("calm"))
        if not (len(block.ids) == 5 and (block.weights == 1).all() and (block.slots == 1).all()):
            raise Finding(f"rows that no call named have changed: {block}")
        self._begin_anew()
        with MemoryStore(1) as own:
            for spec in SPECS.values():
                own.create_table(spec)
            for store in (self.client, own):
                _train(store)
            served = {key: row for key, row in rows(self.client).items() if key[0] != "calm"}
            if served != (expected := rows(own)):
                wrong = {table for (table, _), _ in served.items() ^ expected.items()}
                raise Finding(f"tables {sorted(wrong)}: a good client's rows differ after the fuzzing")

    def _begin_anew(self) -> None:
        """All tables but the calm one made anew, at version 0, without pins."""
        for token in _TOKENS:
            request = store_pb2.PinRequest(token=token).SerializeToString()
            self.channel.unary_unary(f"/{self.service.full_name}/Pin", None, None)(request, WAIT_S, self.metadata)
        ends = time.monotonic() + WAIT_S
        while self.store.pins() and time.monotonic() < ends:  # of other tokens, whose leases are short
            time.sleep(0.01)
        for name in self.client.specs():
            if name != "calm":
                self.client.drop_table(name)
        self.client.reset_version(0)
        for spec in SPECS.values():
            self.client.create_table(spec)


def _train(store: EmbeddingStore) -> None:
    """A few commits, puts and deletions that are a pure function of nothing."""
    random = np.random.default_rng(3)
    for step in range(3):
        updates: Mapping[str, TableUpdate] = {
            name: TableUpdate(
                ids := np.sort(random.choice(20, 6, replace=False)).astype(np.int64),
                random.normal(size=(len(ids), spec.dim)).astype(np.float32),
            )
            for name, spec in SPECS.items()
            if spec.dtype != "int8"  # those are for serving
        }
        store.commit(Commit(store.version() + 1, updates, step, {"any": 0.25}))
    store.delete("any", np.array([0, 1, 2], np.int64))


def _client_push(m: Mutator) -> Seed:
    terms = store_pb2.PushTerms(version=m.choice((None, None, 1)), learning_rates={"any": 0.1}, summed=m.chance(0.5))
    header = store_pb2.RowPushHeader(sender=m.choice(("a", "b")), micro_batch=1 + m.random.randrange(999), terms=terms)
    part, body = header.parts.add(), b""
    for name in m.random.sample(sorted(SPECS), m.small(3)):
        ids = _ids(m, SPECS[name])
        part.slices.add(table=name, count=len(ids), dim=SPECS[name].dim)
        body += ids.tobytes() + _floats(m, len(ids), SPECS[name].dim).tobytes()
    return header, body


def _pin(m: Mutator) -> Seed:
    lease_s = m.choice((0.0, 0.01, 1.0, 5.0))
    return store_pb2.PinRequest(lease_s=lease_s, token=m.choice(_TOKENS), renew=m.chance(0.2)), b""


def _status(m: Mutator) -> Seed:
    wanted = {name: m.chance(0.3) for name in ("tables", "rows", "pins", "owner", "shard", "owned")}
    return store_pb2.StoreStatusRequest(at_least=1, wait_ms=1, **wanted), b""


def record_seed(m: Mutator) -> Seed:
    """What a ResetVersion says."""
    version, take_back = m.choice((None, 0, 1)), m.chance(0.3)
    record = None if take_back or m.chance(0.3) else m.bytes(m.small(20))
    frame = store_pb2.RecordFrame.FromString(next(record_frames(record, version, take_back=take_back)))
    return frame.header, frame.body


_IDS = np.array([1, 2, 3], np.int64)


def _change() -> Commit:
    return Commit(1, {"any": TableUpdate(_IDS, np.ones((3, SPECS["any"].dim), np.float32))}, 0, {})


def _pinned(store: RemoteStore) -> None:
    with store.pin(lease_s=0.5) as pin:
        pin.lookup({"any": _IDS})
        pin.renew(0.5)


def _followed(store: RemoteStore) -> None:
    with HeldServers([store.address], 0.5) as held:
        held.lookup({"any": _IDS})
        held.advance()


def _put(store: RemoteStore) -> None:
    ones = np.ones((3, 3), np.float32)
    store.put("any", [RowBlock(_IDS, ones, ones)])
    store.put_table_state("rare", TableState(np.zeros(64, np.uint8)))


STORE_CALLS: dict[str, Call] = {
    "GetStoreStatus": Call(
        _status, lambda store: (store.specs(), store.version(), store.wait_for_version(0, 0.01), store.pins())
    ),
    "Lookup": Call(
        _lookup,
        lambda store: store.lookup({"any": np.arange(310_000, dtype=np.int64)}),
        store_pb2.LookupRequest,
        {"LookupRequest": lambda frames: FrameReader(frames, "LookupRequest").header(store_pb2.LookupHeader)},
    ),
    "LookupSmall": Call(_lookup, lambda store: store.lookup({"any": _IDS, "fixed": _IDS}), store_pb2.LookupRequest),
    "TableStatistics": plain(
        store_pb2.TableStatisticsRequest,
        store_words,
        lambda store: (store.table_statistics("any"), store.row_count("any")),
    ),
    "ReadRows": Call(
        _rows,
        lambda store: (store.read_rows("any", _IDS), list(store.scan("any")), store.table_state("rare")),
        store_pb2.RowIdsFrame,
    ),
    "Follow": replace(plain(store_pb2.FollowRequest, store_words, _followed), first_reply=True),
    "Pin": Call(_pin, _pinned),
    "CreateTable": Call(_spec, lambda store: store.create_table(SPECS["any"])),
    "PushRows": Call(
        _client_push,
        lambda store: (store.commit(_change()), store.update(_change().updates, {})),
        store_pb2.RowPushFrame,
        {"ClientPush": row_push_from_frames},
    ),
    "Put": Call(_block, _put, store_pb2.RowBlockFrame, {"RowBlock": lambda frames: list(blocks_from_frames(frames))}),
    "Delete": Call(_rows, None, store_pb2.RowIdsFrame, {"RowIds": ids_from_frames}),
    "DropTable": plain(
        store_pb2.DropTableRequest,
        store_words,
        lambda store: (store.clear("any"), store.drop_table("half"), store.create_table(SPECS["half"])),
    ),
    "ResetVersion": Call(
        record_seed,
        lambda store: store.reset_version(0),
        store_pb2.RecordFrame,
        {"Record": record_from_frames, "ResetVersion": reset_from_frames},
    ),
}
"""By name; others are of one message, drawn from its fields."""

OF_SERVERS = ("GetStoreStatus", "CreateTable", "Put", "Delete", "DropTable", "ResetVersion")
"""Those that are others at store servers, whose owner alone changes them."""
