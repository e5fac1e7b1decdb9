"""The EmbeddingStore service: decodes calls, hands them to a store, encodes the answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import grpc
import numpy as np

from embedding_store.errors import BadInput, TableNotFound
from embedding_store.frames import MAX_BODY_BYTES, ONE_FRAME_BYTES, BodyPlan, FrameReader, encode
from embedding_store.grpc_server import Service
from embedding_store.rpc_errors import answering
from embedding_store.spec import TableSpec
from embedding_store.spec_messages import STORE_SERVICE, spec_from_message, spec_to_message
from embedding_store.store import EmbeddingStore, Int64
from embedding_store.v1 import store_pb2

__all__ = ["store_service"]

_INT64 = np.dtype(np.int64)
_LONGEST_WAIT_S = 60.0


def store_service(store: EmbeddingStore) -> Service:
    """The service that answers for `store`."""
    servicer = _StoreServicer(store)
    return Service(
        STORE_SERVICE,
        {
            "CreateTable": grpc.unary_unary_rpc_method_handler(
                servicer.create_table,
                store_pb2.CreateTableRequest.FromString,
                store_pb2.CreateTableReply.SerializeToString,
            ),
            "ListTables": grpc.unary_unary_rpc_method_handler(
                servicer.list_tables,
                store_pb2.ListTablesRequest.FromString,
                store_pb2.ListTablesReply.SerializeToString,
            ),
            "Lookup": grpc.stream_stream_rpc_method_handler(servicer.lookup),
            "LookupSmall": grpc.unary_unary_rpc_method_handler(servicer.lookup_small),
        },
    )


class _StoreServicer:
    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self._specs: dict[str, TableSpec] = {}  # of the tables seen so far; a table keeps its spec

    def create_table(
        self, request: store_pb2.CreateTableRequest, context: grpc.ServicerContext
    ) -> store_pb2.CreateTableReply:
        with answering(context):
            return store_pb2.CreateTableReply(created=self._store.create_table(spec_from_message(request.spec)))

    def list_tables(
        self, request: store_pb2.ListTablesRequest, context: grpc.ServicerContext
    ) -> store_pb2.ListTablesReply:
        with answering(context):
            tables = [
                store_pb2.TableStatus(
                    spec=spec_to_message(spec), rows=self._store.row_count(name) if request.count_rows else None
                )
                for name, spec in self._store.specs().items()
            ]
            return store_pb2.ListTablesReply(tables=tables, version=self._store.version())

    def lookup(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        with answering(context):
            yield from self._reply(frames, MAX_BODY_BYTES)

    def lookup_small(self, frame: bytes, context: grpc.ServicerContext) -> bytes:
        with answering(context):
            replies = self._reply((frame,), ONE_FRAME_BYTES)
            reply = next(replies)
            if next(replies, None) is not None:
                raise BadInput("LookupRequest: the header of its reply leaves no room in one frame; call Lookup")
            return reply

    def _reply(self, frames: Iterable[bytes], limit: int) -> Iterator[bytes]:
        ids, version, wait_s = _read_request(frames)
        specs = self._specs_of(ids)
        _refuse_long_reply(sum(len(wanted) * specs[table].dim * 4 for table, wanted in ids.items()), limit)
        if version is not None and wait_s:
            self._store.wait_for_version(version, wait_s)
        header = store_pb2.LookupReplyHeader(version=self._store.version() if version is None else version)
        rows = self._store.lookup(ids, version)
        for table in ids:
            count, dim = rows[table].shape
            header.tables.add(table=table, count=count, dim=dim, dtype="float32")
        return encode(header.SerializeToString(), [rows[table] for table in ids])

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


def _refuse_long_reply(size: int, limit: int) -> None:
    """Few ids may ask for many bytes: bounds the reply before the rows are gathered."""
    if size > limit:
        instead = "call Lookup" if limit < MAX_BODY_BYTES else "split the call"
        raise BadInput(f"LookupRequest: it asks for {size} bytes of rows, above the limit of {limit}; {instead}")


def _read_request(frames: Iterable[bytes]) -> tuple[dict[str, Int64], int | None, float]:
    """Ids by table, the version wanted, and the seconds to wait for it."""
    reader = FrameReader(frames, "LookupRequest")
    header = reader.header(store_pb2.LookupHeader)
    plan = BodyPlan("LookupRequest")
    for entry in header.tables:
        plan.add(f"ids of table {entry.table!r}", (entry.count,), _INT64)
    tables = [entry.table for entry in header.tables]
    if len(set(tables)) < len(tables):
        raise BadInput("LookupRequest: a table stands in it twice; join its ids")
    ids = dict(zip(tables, reader.read(plan), strict=True))
    if not 0 <= header.wait_ms <= _LONGEST_WAIT_S * 1000:
        raise BadInput(f"LookupRequest: wait_ms {header.wait_ms}: wait from 0 to {_LONGEST_WAIT_S * 1000:.0f}")
    return ids, header.version if header.HasField("version") else None, header.wait_ms / 1000
