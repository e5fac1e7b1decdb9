"""Answers changed on their way to clients by servers that lie, and parsers of frames without a server around them."""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor import ServiceDescriptor

from elastable.embedding_store.engine.store_history import FollowedChange, StoreHistory
from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.log.changes import DropTable, ResetVersion, decode_change, encode_change
from elastable.embedding_store.shards.shard import Shard
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.access.credentials import PROOF_KEYS
from elastable.embedding_store.wire.messages.frames import REQUEST_KEY
from elastable.embedding_store.wire.messages.store_messages import followed_frames, followed_from_frames
from elastable.embedding_store.wire.pushes.remote_store import RemoteStore, ShardClient
from elastable.embedding_store.wire.pushes.shard_service import shard_service
from elastable.embedding_store.wire.server.grpc_server import Service
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore, channels_of
from elastable.master.api import DenseSnapshot, JobSpec
from elastable.master.commits.dense_part import DensePart
from elastable.master.core.job_master import Master
from elastable.master.rpc.client import MasterClient
from elastable.master.rpc.master_service import master_service
from elastable.master.rpc.messages import dense_frames, dense_from_frames
from elastable.master.v1 import master_pb2
from tests.embedding_store.serving import client_service
from tests.fuzz.calls import WAIT_S, Call, Seed, made_messages, served
from tests.fuzz.master_calls import MASTER_CALLS, words_of_all
from tests.fuzz.mutator import Mutator
from tests.fuzz.shard_calls import SHARD_CALLS
from tests.fuzz.store_calls import SPECS, STORE_CALLS
from tests.fuzz.target import Target, is_named

_DEADLINE_S = 0.5  # a lie may be that there is no answer yet, which is asked again until then
_ARGUMENTS = {"table": "any", "ids": np.array([1, 2, 3], np.int64)}


class _Liar(grpc.GenericRpcHandler):
    """Asks a real server, and changes what it answers."""

    def __init__(self, truth: grpc.Channel) -> None:
        self._truth = truth
        self.mutator: Mutator | None = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[object, object]:
        """A handler for any call: on the wire all kinds are streams of bytes."""
        method = handler_call_details.method

        def answer(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            m = self.mutator
            passed = (*PROOF_KEYS.values(), REQUEST_KEY)
            said = [one for one in context.invocation_metadata() if one[0] in passed]
            replies = self._truth.stream_stream(method, None, None)(messages, WAIT_S, said)  # type: ignore[arg-type]
            if not context.add_callback(replies.cancel):
                replies.cancel()
            try:
                for reply in replies:
                    yield reply if m is None or m.chance(0.3) else m.mutated(reply)
                    if m is not None and m.chance(0.05):
                        return
                    if m is not None and m.chance(0.05):
                        yield m.bytes(m.small(20))
            except grpc.RpcError as error:
                if isinstance(error, grpc.Call):
                    context.set_trailing_metadata(tuple(error.trailing_metadata() or ()))
                    context.abort(error.code(), error.details() or "")
                raise
            finally:
                replies.cancel()

        return grpc.stream_stream_rpc_method_handler(answer)


class _Replies(Target):
    service: ServiceDescriptor  # whose calls
    questions: dict[str, Callable[[object], object]]  # name of a call -> what makes it, through Elastable's own client
    share = 10

    def open(self) -> None:
        store = self.held.enter_context(SharedMemoryStore(1))
        store.keep_history(StoreHistory(self.held.enter_context(TemporaryDirectory()) + "/log"))
        for spec in SPECS.values():
            store.create_table(spec)
        self.liar = _Liar(served(self.held, *self.services(store))[1])
        pool = self.held.enter_context(ThreadPoolExecutor(16))
        server = grpc.server(pool, handlers=(self.liar,))  # type: ignore[arg-type]
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        self.held.callback(lambda: server.stop(None).wait(WAIT_S))
        self.client = self.connect()

    def services(self, store: SharedMemoryStore) -> list[Service]:
        master = Master(JobSpec(job="lied", train_records=9), store, DensePart())
        return [client_service(store), master_service(master, channels_of(store))]

    @abstractmethod
    def connect(self) -> object:
        """A client of the liar."""

    def case(self, m: Mutator) -> str | None:
        name = m.choice(sorted(self.questions))
        if name == "Lookup" and m.chance(0.9):  # of megabytes
            name = "LookupSmall"
        self.liar.mutator = m
        try:
            self.questions[name](self.client)
        except ElastableError as error:
            if not is_named(error):
                raise
            return f"{name}: {type(error).__name__}"
        finally:
            self.liar.mutator = None
        return f"{name}: done"

    def check(self) -> None:
        """The same client is answered rightly, once nobody lies any more."""
        for ask in self.questions.values():
            try:
                ask(self.client)
            except ElastableError as error:
                if not is_named(error):
                    raise


def by_method(call: str) -> Callable[[Any], Any]:
    """Makes a call by the method of a client that has its name."""
    name = re.sub(r"(?<!^)([A-Z])", r"_\1", call).lower()

    def ask(client: object) -> object:
        method = getattr(client, name)
        return method(*(_ARGUMENTS[argument] for argument in inspect.signature(method).parameters))

    return ask


def _asked(calls: Mapping[str, Call], names: Iterable[str]) -> dict[str, Callable[[Any], Any]]:
    return {name: (calls[name].ask if name in calls else None) or by_method(name) for name in sorted(names)}


class StoreReplies(_Replies):
    name = "store-replies"
    service = store_pb2.DESCRIPTOR.services_by_name["Store"]
    questions = _asked(STORE_CALLS, set(service.methods_by_name) - (set(SHARD_CALLS) - set(STORE_CALLS)))

    def connect(self) -> RemoteStore:
        return self.held.enter_context(RemoteStore(self.address, _DEADLINE_S))


class MasterReplies(_Replies):
    name = "master-replies"
    service = master_pb2.DESCRIPTOR.services_by_name["Master"]
    questions = _asked(MASTER_CALLS, service.methods_by_name)

    def connect(self) -> MasterClient:
        return self.held.enter_context(MasterClient(self.address, _DEADLINE_S))


class ShardReplies(_Replies):
    name = "shard-replies"
    service = StoreReplies.service
    questions = _asked(SHARD_CALLS, SHARD_CALLS)

    def services(self, store: SharedMemoryStore) -> list[Service]:
        return [shard_service(Shard(store, 1 << 20), channels_of(store))]

    def connect(self) -> ShardClient:
        return self.held.enter_context(ShardClient(self.address, _DEADLINE_S))


def _dense(m: Mutator) -> Seed:
    snapshot = DenseSnapshot(m.small(3), (np.ones((2, 3), np.float32),), (np.arange(3),), ("kernel",), ("count",))
    frame = master_pb2.DenseFrame.FromString(next(dense_frames(snapshot)))
    return frame.header, frame.body


def _followed(m: Mutator) -> Seed:
    content = b"".join(encode_change(DropTable("any") if m.chance(0.5) else ResetVersion(m.bytes(9))))
    change = FollowedChange(m.small(3), m.choice((None, content)), begin=m.chance(0.5))
    frame = store_pb2.FollowFrame.FromString(next(followed_frames(change)))
    return frame.header, frame.body


FOLLOWED = Call(
    _followed,
    bulk=store_pb2.FollowFrame,
    parsers={
        "Followed": lambda frames: [
            decode_change(memoryview(it.payload)) for it in followed_from_frames(frames) if it.payload
        ]
    },
)
DENSE = Call(_dense, bulk=master_pb2.DenseFrame, parsers={"Dense": dense_from_frames})
CALLS = (*STORE_CALLS.values(), *SHARD_CALLS.values(), *MASTER_CALLS.values(), FOLLOWED, DENSE)
PARSERS = {name: (call, parse) for call in CALLS for name, parse in (call.parsers or {}).items()}
"""Name of a parser -> a call that it is of, and the parser."""


class Frames(Target):
    """Each kind of bulk message, as its parser reads it."""

    name = "frames"
    share = 3000

    def case(self, m: Mutator) -> str | None:
        call, parse = PARSERS[m.choice(sorted(PARSERS))]
        parse(iter(made_messages(m, call, words_of_all)))
        return None
