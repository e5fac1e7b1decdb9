"""The Store service: decodes calls, hands them to a store, encodes the answers; and the pins that clients hold."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
from google.protobuf.message import Message

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.snapshot import Snapshot, require_lease
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.store_history import FollowedChange
from elastable.embedding_store.errors import BadInput, ElastableError, StaleVersion, TableNotFound, Unsupported
from elastable.embedding_store.measures import LookupCounts
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.support.array_body import MAX_BODY_BYTES, BodyPlan
from elastable.embedding_store.support.futures import Timers, at_once, settle, settle_error
from elastable.embedding_store.tables.checks import require_ids
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.access.credentials import Proofs
from elastable.embedding_store.wire.messages import store_messages as messages
from elastable.embedding_store.wire.messages.frames import ONE_FRAME_BYTES, FrameReader, ReplyFrames, ReplyRoom, encode
from elastable.embedding_store.wire.messages.plain_data import to_message
from elastable.embedding_store.wire.server.grpc_server import NotReady, Service
from elastable.embedding_store.wire.server.handlers import Answer, Later, handlers_of
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore

LONGEST_LEASE_S = 3600.0
"""For how long a client that may be gone by then may have a version kept, without renewing it."""

TOKEN_BYTES = 16
MOST_PINS = 1024
"""Pins of all clients."""

MOST_PINS_OF_A_CLIENT = 256
"""Of one connection."""

_NAMED_S = 600.0  # after its lease a pin is known for so long, to say what became of it


@dataclass(frozen=True, slots=True)
class _HeldPin:
    """A pin of a client: until when its token is known, and the address it was asked for from."""

    pin: Snapshot
    until: float
    client: str
    version: int


class ServedPins:
    """The pins that clients have of a store, by their tokens.

    Args:
        store: What is pinned.
    """

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self._changing = threading.Lock()
        self._pins: dict[bytes, _HeldPin] = {}

    def source(self, token: bytes) -> Snapshot:
        """The store for an empty token, else the pin of that token.

        Raises:
            StaleVersion: there is none.
        """
        if not token:
            return self._store
        known = self._pins.get(token)
        if known is None:
            raise StaleVersion(
                "there is no such pin here: it was released, its lease ended, an administrator gave it up, or the "
                "server was started anew"
            )
        return known.pin

    def close(self) -> None:
        """Releases them all."""
        with self._changing:
            held, self._pins = list(self._pins.values()), {}
        for each in held:
            each.pin.close()

    def make_way(self, what: str, force: bool) -> None:
        """For `what`, which cannot be while versions are pinned: gives the pins of clients up where it is forced.

        Raises:
            BadInput: not forced, and clients hold pins; says who they are.
        """
        self._forget_old()
        if force:
            self.close()
            return
        with self._changing:
            pinned = [held for held in self._pins.values() if held.until - _NAMED_S > time.monotonic()]
        if pinned:
            holders = ", ".join(sorted({f"{held.client} (version {held.version})" for held in pinned}))
            raise BadInput(
                f"{what} while versions are pinned, by {holders}: let them be released or run out, or force it, which "
                "gives these pins up"
            )

    def pin(self, request: store_pb2.PinRequest, client: str) -> store_pb2.PinReply:
        """Pins a version, or says which one a pin of that token has; renews or releases a pin."""
        if len(request.token) != TOKEN_BYTES:
            raise BadInput(f"PinRequest: a token has {TOKEN_BYTES} bytes, got {len(request.token)}")
        if request.lease_s == 0:
            return self._release(request.token)
        if require_lease(lease_s := request.lease_s) > LONGEST_LEASE_S:
            raise BadInput(f"PinRequest: lease_s {lease_s:g}: ask for {LONGEST_LEASE_S:g} s at most, and renew")
        if request.renew:
            return self._renew(request.token, lease_s)
        self._forget_old()
        known = self._pins.get(request.token)
        if known is None and len(self._pins) >= MOST_PINS:
            raise BadInput(f"PinRequest: {MOST_PINS} pins are held here, as many as there may be; release some")
        if known is None and self._held_by(client) >= MOST_PINS_OF_A_CLIENT:
            raise BadInput(f"PinRequest: this client holds {MOST_PINS_OF_A_CLIENT} pins, the most of one; release some")
        if known is None:
            pin = self._store.pin(request.version if request.HasField("version") else None, lease_s)
            with self._changing:
                held = _HeldPin(pin, _known_until(lease_s), client, pin.version())
                known = self._pins.setdefault(request.token, held)
            if known.pin is not pin:  # the same call has come twice at the same time
                pin.close()
        return store_pb2.PinReply(version=known.version)

    def _held_by(self, client: str) -> int:
        with self._changing:
            return sum(held.client == client for held in self._pins.values())

    def _renew(self, token: bytes, lease_s: float) -> store_pb2.PinReply:
        (pin := self.source(token)).renew(lease_s)
        with self._changing:
            if (held := self._pins.get(token)) is not None:
                self._pins[token] = replace(held, until=_known_until(lease_s))
        return store_pb2.PinReply(version=pin.version())

    def _release(self, token: bytes) -> store_pb2.PinReply:
        """Harmless where there is none."""
        with self._changing:
            known = self._pins.pop(token, None)
        if known is not None:
            known.pin.close()
        return store_pb2.PinReply()

    def _forget_old(self) -> None:
        """Pins of clients that are gone have ended by themselves; their tokens are forgotten here."""
        now = time.monotonic()
        with self._changing:
            old = [token for token, held in self._pins.items() if held.until < now]
            gone = [self._pins.pop(token).pin for token in old]
        for pin in gone:
            pin.close()


def _known_until(lease_s: float) -> float:
    return time.monotonic() + lease_s + _NAMED_S


_INT64 = np.dtype(np.int64)
_BLOCK_BYTES = 64 << 20
_FEW_BYTES = 64 << 10  # below this a second copy costs less than laying frames out
_GATHERERS = 8  # lookups of many frames at once; more wait


def store_service(
    store: EmbeddingStore, lookups: LookupCounts | None = None, not_ready: NotReady = lambda: None
) -> Service:
    """The service that answers for the store of a job's master, which only the master may change.

    Args:
        store: Where rows are.
        lookups: Counts what clients look up; None: nobody wants to know.
        not_ready: As of `Service`.
    """
    return _MastersStore(store, lookups).service(not_ready, {})


class StoreServicer:
    """Answers the calls of one store.

    Args:
        store, lookups: As of `store_service`.

    Attributes:
        pins: Those of its clients.
    """

    def __init__(self, store: EmbeddingStore, lookups: LookupCounts | None = None) -> None:
        self._store, self._lookups = store, lookups or LookupCounts()
        self.pins = ServedPins(store)
        self.pin = self.pins.pin
        self._gatherers = ThreadPoolExecutor(_GATHERERS, "gather")
        self._room = ReplyRoom()
        self._versions = VersionWaits(store)
        self._specs: dict[str, TableSpec] = {}  # of the tables seen so far; a table keeps its spec

    def service(self, not_ready: NotReady, proofs: Proofs) -> Service:
        """The service; `proofs`: as of `Service`."""
        handlers, waiting = handlers_of(messages.STORE_SERVICE, self), frozenset({"GetStoreStatus"})
        return Service(messages.STORE_SERVICE, handlers, self.close, frozenset(), waiting, not_ready, proofs)

    def close(self) -> None:
        """Releases what clients have pinned, and ends the threads that gather, once what is under way is done."""
        self.pins.close()
        self._gatherers.shutdown(wait=False)

    def forget_specs(self) -> None:
        """Call it after a table was dropped."""
        self._specs = {}

    def get_store_status(self, request: store_pb2.StoreStatusRequest, owner: bytes) -> Later[None]:
        wait_s = messages.wait_seconds("StoreStatusRequest", request.wait_ms)
        of_shard = self.status_of_shard(request, owner)
        there = self._versions.when(request.at_least, wait_s)
        return Later(there, lambda _: self._status(request, of_shard))

    def status_of_shard(self, request: store_pb2.StoreStatusRequest, owner: bytes) -> store_pb2.StoreStatus:
        """What only store servers say; `owner`: what the caller shows. Raises `Unsupported` where there is nothing."""
        if request.owner or request.shard or request.owned:
            raise Unsupported("GetStoreStatus: this is no store server, and has neither an owner nor a share of a job")
        return store_pb2.StoreStatus()

    def _status(self, request: store_pb2.StoreStatusRequest, status: store_pb2.StoreStatus) -> store_pb2.StoreStatus:
        status.version = self._store.version()
        for name, spec in self._store.specs().items() if request.tables or request.rows else ():
            rows = self._store.row_count(name) if request.rows else None
            status.tables.add(spec=messages.spec_to_message(spec), rows=rows)
        for of in self._store.pins() if request.pins else ():  # those of other clients and of the server itself, too
            status.pins.append(to_message(store_pb2.PinStatus, of))
        return status

    def table_statistics(self, request: store_pb2.TableStatisticsRequest) -> store_pb2.TableStatisticsReply:
        if request.pin:
            return store_pb2.TableStatisticsReply(rows=self.pins.source(request.pin).row_count(request.table))
        return to_message(store_pb2.TableStatisticsReply, self._store.table_statistics(request.table))

    def attach(self, request: store_pb2.AttachRequest) -> store_pb2.AttachReply:
        if not isinstance(self._store, SharedMemoryStore):
            raise Unsupported("Attach: the rows of this store are not in shared memory")
        return store_pb2.AttachReply(socket=self._store.attachments.name, token=self._store.attachments.token)

    def follow(self, request: store_pb2.FollowRequest) -> Later[None]:
        if not isinstance(self._store, MemoryStore):
            raise Unsupported(
                "Follow: the rows of this job are in several stores; follow its store servers (servers:host:port,...)"
            )
        begin, following = self._store.follow()

        def go_on(changes: Iterable[FollowedChange]) -> Later[list[FollowedChange]]:
            return Later(following.take(), go_on, chain.from_iterable(map(messages.followed_frames, changes)))

        return Later(at_once(None), lambda _: go_on(()), chain.from_iterable(map(messages.followed_frames, begin)))

    def read_rows(self, frames: Iterator[bytes], client: str) -> Iterator[bytes]:
        header, ids = messages.ids_from_frames(frames)
        table, source = header.table, self.pins.source(header.pin)
        if header.block_rows < 0:
            raise BadInput(f"ReadRows: block_rows {header.block_rows}: it must not be negative")
        if (len(ids) and (header.block_rows or header.state)) or (header.block_rows and header.state):
            raise BadInput("ReadRows: ids, block_rows or state: ask for one of them")
        if header.state:
            admission = self._specs_of((table,))[table].admission
            size = 0 if admission is None else 2 * admission.counters
            return self._sent(size, client, lambda: messages.state_frames(table, source.table_state(table)))
        row_bytes = self._row_bytes(table)
        if header.block_rows:
            rows = min(header.block_rows, max(1, _BLOCK_BYTES // row_bytes))
            blocks = (messages.block_frames(table, block) for block in source.scan(table, rows))
            return self._sent(rows * row_bytes, client, lambda: chain.from_iterable(blocks))
        size = len(ids) * row_bytes
        _refuse_long_reply("ReadRows", size, MAX_BODY_BYTES)
        return self._sent(size, client, lambda: messages.block_frames(table, source.read_rows(table, ids)))

    def _sent(self, size: int, client: str, frames: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
        """Frames of a reply, once there is room for it."""
        with self._room.taken(size, client):
            yield from frames()

    def lookup(self, frames: Iterator[bytes], client: str) -> Later[None]:
        return self._reply(frames, MAX_BODY_BYTES, client, lambda replies: replies)

    def lookup_small(self, frame: bytes, client: str) -> Answer:
        return self._reply((frame,), ONE_FRAME_BYTES, client, _only_frame).at_once()

    def _reply(
        self, frames: Iterable[bytes], limit: int, client: str, answer: Callable[[Iterator[bytes]], Answer]
    ) -> Later[None]:
        ids, version, wait_s, pin = _read_request(frames)
        source, specs = self.pins.source(pin), self._specs_of(ids)
        size = sum(len(wanted) * specs[table].dim * 4 for table, wanted in ids.items())
        _refuse_long_reply("LookupRequest", size, limit)
        self._lookups.add(ids)
        waits = version is not None and not pin
        there = self._versions.when(version or 0, wait_s if waits else 0.0)
        return Later(there, lambda _: answer(self._rows(source, specs, ids, version, size, client)))

    def _rows(
        self,
        source: Snapshot,
        specs: Mapping[str, TableSpec],
        ids: Mapping[str, Int64],
        version: int | None,
        size: int,
        client: str,
    ) -> Iterator[bytes]:
        header = store_pb2.LookupReplyHeader(version=source.version() if version is None else version)
        if size <= _FEW_BYTES:
            rows = source.lookup(ids, version)
            for table, found in rows.items():
                header.tables.add(table=table, count=len(found), dim=found.shape[1], dtype="float32")
            return encode(header.SerializeToString(), rows.values())
        for table, wanted in ids.items():
            require_ids(specs[table], wanted)  # here, as the store only sees pieces of them
            header.tables.add(table=table, count=len(wanted), dim=specs[table].dim, dtype="float32")
        dims, said = {table: specs[table].dim for table in ids}, header.SerializeToString()
        return self._sent(size, client, lambda: ReplyFrames(said, ids, dims).filled(source, version, self._gatherers))

    def _row_bytes(self, table: str) -> int:
        """Bytes of a row with its slots, on the wire."""
        spec = self._specs_of((table,))[table]
        return 8 + 4 * (spec.dim + row_optimizer(spec.optimizer).slot_width(spec.dim)) + 16

    def _specs_of(self, tables: Iterable[str]) -> dict[str, TableSpec]:
        """Specs by table, of these at least; the store is asked only about tables never seen."""
        specs = self._specs
        missing = [table for table in tables if table not in specs]
        if missing:
            self._specs = specs = self._store.specs()
            for table in missing:
                if table not in specs:
                    raise TableNotFound(f"no table {table!r}; there are {', '.join(map(repr, specs)) or 'none'}")
        return specs


class _MastersStore(StoreServicer):
    """Of the store of a job's master: refuses what would change it."""

    def __init__(self, store: EmbeddingStore, lookups: LookupCounts | None) -> None:
        super().__init__(store, lookups)
        for call in ("create_table", "drop_table", "put", "delete", "reset_version", "push_rows"):
            setattr(self, call, partial(_refuse, call.title().replace("_", "")))


def _refuse(call: str, request: object) -> Message:
    raise Unsupported(f"{call}: the store behind this port belongs to its master's job and is only read from")


def _only_frame(replies: Iterator[bytes]) -> bytes:
    reply = next(replies)
    if next(replies, None) is not None:
        raise BadInput("LookupRequest: the header of its reply leaves no room in one frame; call Lookup")
    return reply


def _refuse_long_reply(message: str, size: int, limit: int) -> None:
    """Few ids may ask for many bytes: bounds the reply before the rows are gathered."""
    if size > limit:
        instead = "call Lookup" if limit < MAX_BODY_BYTES else "split the call"
        raise BadInput(f"{message}: it asks for {size} bytes of rows, above the limit of {limit}; {instead}")


def _read_request(frames: Iterable[bytes]) -> tuple[dict[str, Int64], int | None, float, bytes]:
    """Ids by table, the version wanted, the seconds to wait for it, and the pin to read."""
    reader = FrameReader(frames, "LookupRequest")
    header = reader.header(store_pb2.LookupHeader)
    plan = BodyPlan("LookupRequest")
    for entry in header.tables:
        plan.add(f"ids of table {entry.table!r}", (entry.count,), _INT64)
    tables = [entry.table for entry in header.tables]
    if len(set(tables)) < len(tables):
        raise BadInput("LookupRequest: a table is in it twice; join its ids")
    ids = dict(zip(tables, reader.read(plan), strict=True))
    wait_s = messages.wait_seconds("LookupRequest", header.wait_ms)
    return ids, messages.optional(header, "version"), wait_s, header.pin


# Calls that wait for a version of a store: one thread watches for all of them, while there are any


_WATCH_S = 1.0  # that the thread stays in one wait: whether anybody waits still


class VersionWaits:
    """The waits for versions of one store. Safe to use from many threads.

    A store that is not notified of commits is asked once, as `RowSource.wait_for_version` says.

    Args:
        store: Whose versions are waited for.
    """

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self._timers = Timers("elastable-version-waits")
        self._lock = threading.Lock()
        self._waiting: dict[Future[None], int] = {}  # -> the version that is waited for
        self._watching = False

    def when(self, version: int, wait_s: float) -> Future[None]:
        """Done once the store is at that version, or after `wait_s` seconds."""
        if wait_s <= 0 or self._store.version() >= version:
            return at_once(None)
        result: Future[None] = Future()
        with self._lock:
            self._waiting[result] = version
            start, self._watching = not self._watching, True
        timer = self._timers.call_at(time.monotonic() + wait_s, lambda: settle(result, None))

        def over(_: object) -> None:
            timer.cancel()
            with self._lock:
                self._waiting.pop(result, None)

        result.add_done_callback(over)
        if start:
            threading.Thread(target=self._watch, name="elastable-versions", daemon=True).start()
        return result

    def _watch(self) -> None:
        """Until nobody waits."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._watching = False
                    return
            try:
                version = self._store.version()
                waits = self._await_next(version)
            except ElastableError as error:
                for result in self._of(None):
                    settle_error(result, error)
                continue
            for result in self._of(version if waits else None):
                settle(result, None)

    def _await_next(self, version: int) -> bool:
        """Waits for the version after that one, for a while; False where the store does not wait."""
        if self._of(version):
            return True
        began = time.monotonic()
        return self._store.wait_for_version(version + 1, _WATCH_S) or time.monotonic() - began > _WATCH_S / 2

    def _of(self, version: int | None) -> list[Future[None]]:
        """Those that wait for that version or one before; None: all."""
        with self._lock:
            return [result for result, wanted in self._waiting.items() if version is None or wanted <= version]
