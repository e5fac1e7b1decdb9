"""The calls of the Store service that store servers have."""

import time
from dataclasses import replace

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from elastable.embedding_store.contract.row_data import Commit
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.shards.ownership import session_of
from elastable.embedding_store.shards.server_contract import PushedCommit, RowPush, RowSave, RowSums, Slices, SumTerm
from elastable.embedding_store.shards.shard import Shard
from elastable.embedding_store.shards.version_sums import sum_pushes
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.access.credentials import PROOF_KEYS, Proof
from elastable.embedding_store.wire.pushes.push_messages import (
    pushed_commit_frames,
    pushed_commit_from_frames,
    row_push_from_frames,
)
from elastable.embedding_store.wire.pushes.remote_store import ShardClient
from elastable.embedding_store.wire.pushes.shard_service import shard_service
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore, channels_of
from elastable.master.checkpoints.row_saver import CheckpointRowSaver
from tests.fuzz.calls import WAIT_S, Call, CallTarget, Seed, plain, served
from tests.fuzz.mutator import Mutator
from tests.fuzz.store_calls import OF_SERVERS, SPECS, STORE_CALLS, store_words
from tests.fuzz.target import Finding

JOB = "fuzzed"
TRAINED = ("fixed", "any", "half", "few")
SECRET = b"a hostile client"
KEY = b"by which workers are known"
PUSH_BYTES = 1 << 20


def _push(m: Mutator) -> Seed:
    header, body = store_pb2.RowPushHeader(job=JOB, version=m.small(2), micro_batch=m.small(2)), b""
    for _ in range(1 + m.small(1)):
        part = header.parts.add()
        for name in m.random.sample(TRAINED, m.small(2)):
            dim, count = SPECS[name].dim, m.small(5)
            ids = np.array([m.random.randrange(20) for _ in range(count)], np.int64)
            values = np.array([m.random.uniform(-1, 1) for _ in range(count * dim)], np.float32)
            part.slices.add(table=name, count=count, dim=dim)
            body += ids.tobytes() + values.tobytes()
    return header, body


def _sums(m: Mutator) -> store_pb2.RowSums:
    terms = m.small(3)
    return store_pb2.RowSums(
        version=m.small(2),
        micro_batches=[m.small(2) for _ in range(terms)],
        parts=[m.small(1) for _ in range(terms)],
        shares=[m.random.uniform(0, 1) for _ in range(terms)],
        rows_once=[1] if m.chance(0.2) else [],
        frozen=["any"] if m.chance(0.2) else [],
    )


def _prepare(m: Mutator) -> Seed:
    ids = {"few": store_pb2.TiedRows(version=m.small(2), count=m.small(5))}
    offer = store_pb2.OfferRequest(time=1.0, most=m.small(5), ids=ids) if m.chance(0.5) else None
    return store_pb2.PrepareRequest(sums=_sums(m), offer=offer), b""


def _commit(m: Mutator) -> Seed:
    commit = PushedCommit(RowSums(0, ()), 0, {"any": 0.1}, {}, m.bytes(m.small(20)) if m.chance(0.5) else None)
    frame = store_pb2.CommitPushedFrame.FromString(next(pushed_commit_frames(commit)))
    frame.header.sums.CopyFrom(_sums(m))
    return frame.header, frame.body


def _claim(m: Mutator) -> Seed:
    claim = store_pb2.ClaimRequest(owner="host:1", job=JOB, may_overflow=m.chance(0.2), first=m.chance(0.5))
    claim.session_key = KEY
    return claim, b""


def _save(m: Mutator) -> Seed:
    request = store_pb2.SaveRowsRequest(
        save=m.bytes(16),
        mark=bytes(16),
        place="/dev/null/checkpoints",  # nothing can be written below it
        draft=m.choice((".writing-" + 32 * "a", "ckpt-0000000001", "..")),
        known="dense.safetensors",
        note={"version": "1"},
        probe="probe-s000" if m.chance(0.3) else "",
        wait_ms=m.small(20),
    )
    for name in m.random.sample(TRAINED, m.small(2)):
        request.tables.add(table=name, prefix=f"table-{m.small(9):04d}-s000", whole=m.chance(0.5), live=m.chance(0.5))
    return request, b""


_SUMS = RowSums(0, (SumTerm(0, 0, 1.0),))


def _pushed_rows(server: ShardClient) -> None:
    slices = Slices(np.arange(1, 4), np.ones((3, SPECS["any"].dim), np.float32))
    server.show_session(session_of(KEY, "w"))
    server.push_rows(RowPush("lied", 0, 0, ({"any": slices},)))


def _prepared(server: ShardClient) -> None:
    server.measure(_SUMS)
    server.offer_rows(PushedCommit(_SUMS, 0, {}), 3, {"few": (0, 2)})


SHARD_CALLS: dict[str, Call] = {
    **{name: STORE_CALLS[name] for name in OF_SERVERS},
    "PushRows": Call(_push, _pushed_rows, store_pb2.RowPushFrame, {"RowPush": row_push_from_frames}),
    "Prepare": Call(_prepare, _prepared),
    "CommitPushed": Call(
        _commit,
        lambda server: server.commit_pushed(PushedCommit(_SUMS, 0, {}, {}, b"record")),
        store_pb2.CommitPushedFrame,
        {"CommitPushed": pushed_commit_from_frames},
    ),
    "ReadRecord": plain(store_pb2.ReadRecordRequest, store_words, lambda server: server.record()),
    "TakeChanges": Call(
        lambda m: (store_pb2.TakeChangesRequest(mark=bytes(16), base=m.bytes(m.choice((0, 16)))), b""),
        lambda server: server.take_changes(bytes(16), b""),
    ),
    "SaveRows": Call(_save, lambda server: server.save_rows(RowSave(bytes(16)))),
    "Claim": Call(_claim, lambda server: server.begin_job("lied", False, KEY)),
    "GetStoreStatus": replace(
        STORE_CALLS["GetStoreStatus"],
        ask=lambda server: (server.other_writer(), server.shard_status(), server.require_owner()),
    ),
    "ResetVersion": replace(
        STORE_CALLS["ResetVersion"], ask=lambda server: (server.recover(), server.reset_version(0, b"record"))
    ),
}
"""By name."""


class ShardCalls(CallTarget):
    """A store server, as `elastable store` runs it."""

    name = "shard-calls"
    share = 200
    service = store_pb2.DESCRIPTOR.services_by_name["Store"]
    metadata = ((PROOF_KEYS[Proof.OWNER], SECRET), (PROOF_KEYS[Proof.SESSION], session_of(KEY, "w")))
    rare = frozenset({"Claim", "DropTable"})

    def open(self) -> None:
        self.calls = SHARD_CALLS
        self.store = self.held.enter_context(SharedMemoryStore(2))
        self.shard = Shard(self.store, PUSH_BYTES, CheckpointRowSaver(self.store))
        self.server, self.channel = served(self.held, shard_service(self.shard, channels_of(self.store)))
        self._begin_anew()

    def words(self, m: Mutator, field: FieldDescriptor) -> object:
        """As `store_words`; the job and the version that would be right are often among them."""
        if field.name == "sender":
            return m.text(["", "", "w", "another"])
        if field.name == "session_key" and m.chance(0.5):
            return KEY
        if field.name == "job":
            return m.text([JOB, JOB, "", "another"])
        if field.name == "version" and m.chance(0.7):
            return self.store.version() + m.choice((-1, 0, 0, 0, 1))
        if field.name in ("micro_batch", "micro_batches", "parts") and m.chance(0.8):
            return m.small(2)
        return store_words(m, field)

    def check(self) -> None:
        """Pushes that are kept stay below their limit; a job trains here as in a store of its own, to the bit."""
        if self.shard.buffered_bytes > PUSH_BYTES:
            raise Finding(f"{self.shard.buffered_bytes} bytes of pushes are kept where {PUSH_BYTES} may be")
        with ShardClient(self.server.address, WAIT_S) as client, MemoryStore(1) as own:
            for name in client.specs():
                client.drop_table(name)
            client.reset_version(0)
            client.begin_job("good", False, KEY)
            client.show_session(session_of(KEY, "good"))
            for store in (client, own):
                for name in TRAINED:
                    store.create_table(SPECS[name])
            for version in range(2):
                pushes = {number: _good_push(version, number) for number in range(2)}
                for push in pushes.values():
                    client.push_rows(push)
                terms = tuple(SumTerm(number, 0, 0.5) for number in pushes)
                sums, time_s = RowSums(version, terms), time.time()
                client.commit_pushed(PushedCommit(sums, version, {"any": 0.25}, {}, None, time=time_s))
                updates = sum_pushes(sums, {number: push.parts for number, push in pushes.items()})
                own.commit(Commit(version + 1, updates, version, {"any": 0.25}, time=time_s))
            for name in TRAINED:
                ids = np.arange(20, dtype=np.int64)
                ours, theirs = own.lookup({name: ids})[name], client.lookup({name: ids})[name]
                if not np.array_equal(ours, theirs, equal_nan=True):
                    raise Finding(f"table {name!r}: rows of a good job differ after the fuzzing")
        self._begin_anew()

    def _begin_anew(self) -> None:
        """The hostile client owns the server, and the tables are empty."""
        claim = store_pb2.ClaimRequest(owner="host:1", job=JOB, first=True, session_key=KEY)
        self._call("Claim", claim)
        for name in self.store.specs():
            self._call("DropTable", store_pb2.DropTableRequest(table=name))
        self._call("ResetVersion", store_pb2.RecordFrame(header=store_pb2.RecordHeader(version=0)))
        for name in TRAINED:
            self.store.create_table(SPECS[name])

    def _call(self, name: str, request: Message) -> None:
        path = f"/{self.service.full_name}/{name}"
        self.channel.unary_unary(path, None, None)(request.SerializeToString(), WAIT_S, self.metadata)


def _good_push(version: int, micro_batch: int) -> RowPush:
    random = np.random.default_rng([version, micro_batch])
    part = {
        name: Slices(random.integers(0, 20, 9), random.standard_normal((9, SPECS[name].dim)).astype(np.float32))
        for name in TRAINED
    }
    return RowPush("good", version, micro_batch, (part,))
