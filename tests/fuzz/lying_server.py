"""Servers that lie: answers are changed on their way to clients."""

from __future__ import annotations

import inspect
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor import ServiceDescriptor

from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableState, TableUpdate
from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.shards.server_contract import PushedCommit, RowPush, RowSave, RowSums, Slices, SumTerm
from elastable.embedding_store.shards.shard import Shard
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.messages.store_messages import OWNER_KEY
from elastable.embedding_store.wire.pushes.remote_store import RemoteStore
from elastable.embedding_store.wire.pushes.shard_client import ShardClient
from elastable.embedding_store.wire.pushes.shard_service import shard_service
from elastable.embedding_store.wire.server.grpc_server import GrpcServer, Service
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore, channels_of
from elastable.master.api import AsyncPushId, EvaluationReport, JobSpec, Push, WorkerIdentity
from elastable.master.commits.dense_part import DensePart
from elastable.master.core.job_master import Master
from elastable.master.rpc.client import MasterClient
from elastable.master.rpc.master_service import master_service
from elastable.master.rpc.worker_identities import SESSION_KEY
from elastable.master.v1 import master_pb2
from tests.embedding_store.serving import client_service
from tests.fuzz.calls import WAIT_S
from tests.fuzz.mutator import Mutator
from tests.fuzz.store_calls import OF_SERVERS, SPECS
from tests.fuzz.target import Target, is_named

_DEADLINE_S = 0.5  # a lie may be that there is no answer yet, which is asked again until then
_IDS = np.array([1, 2, 3], np.int64)


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
            secret = [one for one in context.invocation_metadata() if one[0] in (SESSION_KEY, OWNER_KEY)]
            replies = self._truth.stream_stream(method, None, None)(messages, WAIT_S, secret)  # type: ignore[arg-type]
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
        from concurrent.futures import ThreadPoolExecutor

        store = self.held.enter_context(SharedMemoryStore(1))
        for spec in SPECS.values():
            store.create_table(spec)
        services = self.services(store)
        truthful = self.held.enter_context(GrpcServer("127.0.0.1:0", services, anonymous=Role.ADMINISTRATOR))
        self.liar = _Liar(self.held.enter_context(grpc.insecure_channel(truthful.address)))
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


def _change() -> Commit:
    return Commit(1, {"any": TableUpdate(_IDS, np.ones((3, SPECS["any"].dim), np.float32))}, 0, {})


def _pinned(store: RemoteStore) -> None:
    with store.pin(lease_s=0.5) as pin:
        pin.lookup({"any": _IDS})
        pin.renew(0.5)


def _block() -> RowBlock:
    return RowBlock(_IDS, np.ones((3, 3), np.float32), np.ones((3, 3), np.float32))


def _put(store: RemoteStore) -> None:
    store.put("any", [_block()])
    store.put_table_state("rare", TableState(np.zeros(64, np.uint8)))


STORE = store_pb2.DESCRIPTOR.services_by_name["Store"]
_ARGUMENTS = {"table": "any", "ids": _IDS}


def by_method(call: str) -> Callable[[Any], Any]:
    """Makes a call by the method of a client that has its name."""
    name = re.sub(r"(?<!^)([A-Z])", r"_\1", call).lower()

    def ask(client: object) -> object:
        method = getattr(client, name)
        return method(*(_ARGUMENTS[argument] for argument in inspect.signature(method).parameters))

    return ask


STORE_QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "GetStoreStatus": lambda store: (store.specs(), store.version(), store.wait_for_version(0, 0.01), store.pins()),
    "Lookup": lambda store: store.lookup({"any": np.arange(310_000, dtype=np.int64)}),
    "LookupSmall": lambda store: store.lookup({"any": _IDS, "fixed": _IDS}),
    "TableStatistics": lambda store: (store.table_statistics("any"), store.row_count("any")),
    "ReadRows": lambda store: (store.read_rows("any", _IDS), list(store.scan("any")), store.table_state("rare")),
    "Pin": _pinned,
    "CreateTable": lambda store: store.create_table(SPECS["any"]),
    "PushRows": lambda store: (store.commit(_change()), store.update(_change().updates, {})),
    "Put": _put,
    "DropTable": lambda store: (store.clear("any"), store.drop_table("half"), store.create_table(SPECS["half"])),
    "ResetVersion": lambda store: store.reset_version(0),
}
"""Name of a call -> what makes it."""


class StoreReplies(_Replies):
    name = "store-replies"
    service = STORE
    questions = STORE_QUESTIONS

    def connect(self) -> RemoteStore:
        return self.held.enter_context(RemoteStore(self.address, _DEADLINE_S))


def _joined(master: MasterClient) -> None:
    master.join(WorkerIdentity("worker", "here", 1)).close()


def _pushed(master: MasterClient) -> None:
    slices = {"any": Slices(_IDS, np.ones((3, SPECS["any"].dim), np.float32))}
    master.report_gradient(Push(AsyncPushId("worker", 1, -1), 3, (), slices, (), ()))


MASTER_QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "Join": _joined,
    "LeaseTasks": lambda master: master.lease_tasks("worker", 1, 0.0, ()),
    "PullDense": lambda master: master.pull_dense("worker", None, 0.0),
    "ReportGradient": _pushed,
    "ReportEvaluation": lambda master: master.report_evaluation(EvaluationReport("worker", 0, 0, 1, ())),
    "ReportFailure": lambda master: master.report_failure("worker", ValueError("no"), False),
    "GetStatus": lambda master: master.status(),
    "StopJob": lambda master: master.stop("enough"),
}
"""Name of a call -> what makes it."""


class MasterReplies(_Replies):
    name = "master-replies"
    service = master_pb2.DESCRIPTOR.services_by_name["Master"]
    questions = MASTER_QUESTIONS

    def connect(self) -> MasterClient:
        return self.held.enter_context(MasterClient(self.address, _DEADLINE_S))


_SUMS = RowSums(0, (SumTerm(0, 0, 1.0),))


def _pushed_rows(server: ShardClient) -> None:
    slices = Slices(_IDS, np.ones((3, SPECS["any"].dim), np.float32))
    server.push_rows(RowPush("lied", 0, 0, ({"any": slices},)))


def _prepared(server: ShardClient) -> None:
    server.measure(_SUMS)
    server.offer_rows(PushedCommit(_SUMS, 0, {}), 3, {"few": (0, 2)})


SHARD_QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "PushRows": _pushed_rows,
    "Prepare": _prepared,
    "CommitPushed": lambda server: server.commit_pushed(PushedCommit(_SUMS, 0, {}, {}, b"record")),
    "ReadRecord": lambda server: server.record(),
    "TakeChanges": lambda server: server.take_changes(bytes(16), b""),
    "SaveRows": lambda server: server.save_rows(RowSave(bytes(16))),
    "Claim": lambda server: server.begin_job("lied", False),
    **{name: STORE_QUESTIONS.get(name, by_method(name)) for name in OF_SERVERS},
    "GetStoreStatus": lambda server: (server.other_writer(), server.shard_status(), server.require_owner()),
    "ResetVersion": lambda server: (server.recover(), server.reset_version(0, b"record")),
}
"""Name of a call -> what makes it."""


_NEW = set(STORE.methods_by_name) - set(STORE_QUESTIONS) - set(SHARD_QUESTIONS)
STORE_QUESTIONS |= {name: by_method(name) for name in sorted(_NEW)}


class ShardReplies(_Replies):
    name = "shard-replies"
    service = STORE
    questions = SHARD_QUESTIONS

    def services(self, store: SharedMemoryStore) -> list[Service]:
        return [shard_service(Shard(store, 1 << 20), channels_of(store))]

    def connect(self) -> ShardClient:
        return self.held.enter_context(ShardClient(self.address, _DEADLINE_S))
