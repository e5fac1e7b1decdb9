"""Replies of Redis: parsers fed with them, and a client of a server that lies."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import hiredis
import numpy as np

from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.tiers.redis.connection import Replies
from elastable.embedding_store.tiers.redis.record_codec import (
    CHECK_BYTES,
    PART,
    Parts,
    PlacedRecords,
    RecordReplies,
    WriteReplies,
)
from tests.fuzz.mutator import Mutator
from tests.fuzz.target import Target, is_named
from tests.servers import redis_binary, running_server, valkey_binary
from tests.tcp_proxy import TcpProxy

_ANSWERS = (b"*1", b"$-1", b"$8", b":1", b"+OK", b"-ERR no", b"-MOVED 1 a:1", b":" + b"9" * 5000)
_PIECES = tuple(answer + b"\r\n" for answer in _ANSWERS)


class RedisReplies(Target):
    """Bulk replies, cut anywhere, as they come from a socket."""

    name = "redis-replies"
    share = 2000

    def case(self, m: Mutator) -> str | None:
        parts, asking = _parts([m.small(3) for _ in range(1 + m.small(2))], m.small(1)), m.chance(0.3)
        stream, replies = (_records if m.chance(0.6) else _writes)(m, parts, asking)
        _fed(m, replies, _changed(m, stream))
        return None


def _changed(m: Mutator, stream: bytes) -> bytes:
    if m.chance(0.1):
        return stream
    if m.chance(0.05):
        return m.choice(_PIECES) * m.choice((1, 3, 2000)) + stream
    if m.chance(0.3):
        place = m.random.randrange(len(stream) + 1)
        stream = stream[:place] + m.choice(_PIECES) + stream[place:]
    return m.mutated(stream)


def _bulk(content: bytes | None) -> bytes:
    return b"$-1\r\n" if content is None else b"$%d\r\n%s\r\n" % (len(content), content)


def _parts(counts: Sequence[int], gone: int) -> Parts:
    parts = np.zeros(len(counts), PART)
    parts["rows"], parts["row_at"], parts["gone"] = counts, np.cumsum(counts) - counts, gone
    return parts


def _records(m: Mutator, parts: Parts, asking: bool) -> tuple[bytes, Replies]:
    """What answers an HMGET of each part: the stamp, and the records, of which some are missing."""
    width, stream, total = m.choice((1, 8, 24)), b"", int(parts["rows"].sum())
    for count in parts["rows"].tolist():
        stream += b"+OK\r\n" * asking + b"*%d\r\n" % (count + 1) + _bulk(None if m.chance(0.1) else bytes(8))
        stream += b"".join(_bulk(None if m.chance(0.3) else m.bytes(width + CHECK_BYTES)) for _ in range(count))
    taken = 1 + m.small(width - 1)
    rows, missing = np.zeros((total, taken), np.uint8), np.zeros(total, np.uint8)
    ids = positions = np.arange(total)
    return stream, RecordReplies([(PlacedRecords(ids, positions, width, rows, missing), parts)], asking=asking)


def _writes(m: Mutator, parts: Parts, asking: bool) -> tuple[bytes, Replies]:
    """What answers the write of each part: lengths and numbers, or a transaction."""
    stream = b""
    for gone in parts["gone"].tolist():
        stream += b"+OK\r\n" * asking + b":%d\r\n" % (8 * m.small(1)) + b"+OK\r\n" * asking
        stream += b"+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n:1\r\n:3\r\n" if gone else b":3\r\n"
    return stream, WriteReplies(parts, "here", asking=asking)


def _fed(m: Mutator, replies: Replies, stream: bytes) -> None:
    received, start, stop = np.frombuffer(stream, np.uint8), 0, 0
    while stop < len(stream) and not replies.done:
        stop = min(len(stream), stop + 1 + m.small(200))
        start = replies.feed(received, start, stop)


_SPEC = TableSpec("t", 2)


class LyingRedis(Target):
    """A store in Redis, between which and the real server somebody changes what the server says."""

    name = "lying-redis"
    share = 2

    def open(self) -> None:
        binary = redis_binary() or valkey_binary()
        assert binary is not None, "redis-server or valkey-server is needed"
        folder = Path(self.held.enter_context(TemporaryDirectory()))
        server = self.held.enter_context(running_server(binary, folder))
        self.liar = _Liar(server.port)
        self.held.callback(self.liar.close)
        self.true_url, self.url = server.url, f"redis://127.0.0.1:{self.liar.port}?deadline=0.5&partitions=2"
        with open_store(self.true_url) as store:
            store.create_table(_SPEC)
            _used(store)

    def case(self, m: Mutator) -> str | None:
        self.liar.begin(m)
        try:
            with open_store(self.url) as store:
                _used(store)
        except ElastableError as error:
            if not is_named(error):
                raise
            return type(error).__name__
        finally:
            self.liar.begin(None)
        return None

    def check(self) -> None:
        """The same store is used rightly, once nobody lies."""
        with open_store(self.true_url) as store:
            _used(store)


def _used(store: EmbeddingStore) -> None:
    ids = np.arange(5, dtype=np.int64)
    store.commit(Commit(store.version() + 1, {"t": TableUpdate(ids, np.ones((5, 2), np.float32))}, 0, {}))
    store.lookup({"t": ids})
    store.row_count("t")
    for _ in store.scan("t"):
        pass
    with store.pin(lease_s=0.5) as pin:
        pin.lookup({"t": ids})
    store.delete("t", ids[:1])


class _Liar(TcpProxy):
    def __init__(self, server: int) -> None:
        self._mutator: Mutator | None = None
        self._truths = 0
        super().__init__(server)

    def begin(self, m: Mutator | None) -> None:
        """From now on lies are of this mutator; None: the truth. Connections are new ones."""
        with self._lock:
            self._mutator = m
            self._truths = 0 if m is None else m.small(25)
        self.cut()

    def answer(self, said: bytes) -> bytes:
        with self._lock:
            m = self._mutator
            if m is None:
                return said
            if self._truths:
                self._truths -= 1
                return said
            return _lie(m, said) if m.chance(0.5) else said


def _lie(m: Mutator, said: bytes) -> bytes:
    """Another answer: of other bytes, or of another shape."""
    if m.chance(0.5):
        return _changed(m, said)
    reader = hiredis.Reader()
    reader.feed(said)
    answers = []
    try:
        while (answer := reader.gets()) is not False:
            answers.append(answer)
    except hiredis.ProtocolError:
        return m.mutated(said)
    return b"".join(_written(m, answer) for answer in answers) or m.mutated(said)


def _written(m: Mutator, answer: object, depth: int = 0) -> bytes:
    """An answer as RESP, here and there another one."""
    if m.chance(0.15):
        answer = m.choice(
            (None, 0, -1, 2**63 - 1, b"", b"text", b"\xff\xfe", [], [b"x"], [[b"1"]], b"9" * 5000, "ASK 1 x")
        )
    if isinstance(answer, list) and depth < 20:
        return b"*%d\r\n" % len(answer) + b"".join(_written(m, one, depth + 1) for one in answer)
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    if isinstance(answer, bytes) or answer is None:
        return _bulk(answer)
    return b"-%s\r\n" % str(answer).encode()
