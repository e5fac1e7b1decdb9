"""Calls to a server that dies under them end, whatever they were doing."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import grpc

from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.channels.server_connection import channel
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE
from elastable.embedding_store.wire.remote_source import RemoteSource

CUTS = 30
TIMEOUT_S = 20.0


def test_streams_of_a_server_that_is_cut_off_again_and_again_all_end() -> None:
    """gRPC's own repeat of refused streams lost calls: they outlived their timeout, for ever."""
    served, over = threading.Semaphore(0), threading.Event()

    def answer(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        served.release()
        yield request
        yield request

    handler = grpc.method_handlers_generic_handler("test.Dying", {"Read": grpc.unary_stream_rpc_method_handler(answer)})

    def started(address: str) -> tuple[grpc.Server, str]:
        server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port(address)
        server.start()
        return server, f"127.0.0.1:{port}"

    server, address = started("127.0.0.1:0")
    answered = [0] * 6

    def ask(number: int) -> None:
        with closing(channel(address)) as opened:
            read = opened.unary_stream("/test.Dying/Read", None, None)
            while not over.is_set():
                try:
                    answered[number] += len(list(read(b"x" * 1000, timeout=TIMEOUT_S))) == 2
                except grpc.RpcError:
                    over.wait(0.01)

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(len(answered))]
    for thread in threads:
        thread.start()
    try:
        for _ in range(CUTS):
            for _ in range(25):
                assert served.acquire(timeout=10 * TIMEOUT_S), "no call reached the server any more"
            server.stop(None)
            server.stop(0).wait(60)
            server, _ = started(address)
    finally:
        over.set()
        for thread in threads:
            thread.join(10 * TIMEOUT_S)
        server.stop(0).wait(60)
    assert [thread.is_alive() for thread in threads] == [False] * len(threads)
    assert min(answered) > 0


def test_a_call_that_ends_well_and_without_an_answer_is_made_again() -> None:
    """As a server that is killed may end it: gRPC gives None for the message."""
    given: list[list[bytes]] = [[], [store_pb2.StoreStatus(version=7).SerializeToString()]]
    methods = {"GetStoreStatus": grpc.unary_stream_rpc_method_handler(lambda request, context: iter(given.pop(0)))}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(STORE_SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with RemoteSource(f"127.0.0.1:{port}", deadline_s=60.0) as source:
            assert source.status().version == 7
    finally:
        server.stop(None).wait(60)
    assert given == []
