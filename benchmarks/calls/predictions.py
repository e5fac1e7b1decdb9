"""`elastable serve-model`: requests and records a second, next to `predict_on_batch` of the plain Keras model.

Server, Redis and client share this machine. The click model of 26 ids a record; each request has other ids. While
versions arrive, requests are sent when they are due, whether or not those before are answered. What followers cost is
the time of a commit of 13,312 gradients, five a second, to a store with a log that ten processes follow over gRPC.

    python -m benchmarks.calls.predictions
"""

import json
import os
import select
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from subprocess import Popen

import numpy as np
import numpy.typing as npt

from benchmarks.click_job.sizes import DIM, FEATURES
from benchmarks.harness import Row, compare, interleaved, publish
from benchmarks.processes import child, line_of, own_memory, redis_server

_ROUNDS, _SECONDS, _ROWS, _HELD_ROWS = 7, 2.0, 100_000, 1_000_000
_VERSIONS, _PACED, _PACED_S = 5, 200, 20.0  # versions and requests a second, for so long
_FOLLOWERS, _COMMITS, _COMMIT_ROUNDS = 10, 50, 3
_SELF = "benchmarks.calls.predictions"


def main() -> None:
    """Measures, prints and writes `results/predictions.json`."""
    with ExitStack() as held:
        url = held.enter_context(redis_server()).url
        trained = held.enter_context(child(_SELF, "--train", url))
        line_of(trained)
        server = _address(held.enter_context(child("elastable", "serve-model", url, "--http", "127.0.0.1:0")))
        keras = held.enter_context(child(_SELF, "--keras"))
        line_of(keras)
        one, many = [_predict(ids) for ids in _ids(1)], [_infer(ids) for ids in _ids(64)]
        contenders: dict[str, Callable[[], Sequence[float]]] = {
            "one client": partial(_load, server, one, 1),
            "records": partial(_load, server, one, 16),
            "batches": partial(_load, server, many, 8),
            "keras": partial(_of_child, keras),
        }
        figures = interleaved(contenders, _ROUNDS)
        with child(_SELF, "--follow", url) as follower:
            bytes_a_row = float(line_of(follower))
        with child("elastable", "serve-model", url, "--follow", "--http", "127.0.0.1:0") as following:
            server = _address(following)
            _of_child(trained)
            paced = 1e3 * np.quantile(_paced(server, many), (0.5, 0.99))
        trained.kill()
    commits = interleaved({"none": partial(_commits, 0), "ten": partial(_commits, _FOLLOWERS)}, _COMMIT_ROUNDS)
    rates = {name: [each[0] for each in found] for name, found in figures.items()}
    batches = [64 * each for each in rates["batches"]]
    rows = [
        _at_least("requests of one record (JSON), 16 connections", rates["records"], "requests/s", 1_500),
        _at_least("records in requests of 64 (binary), 8 connections", batches, "records/s", 40_000),
        compare("the same, against predict_on_batch of plain Keras at 64", "records/s", batches, rates["keras"], 0.7),
        Row("one client, one record: p50", 1e6 * statistics.median(each[1] for each in figures["one client"]), "us"),
        *(
            Row.at_most(f"a request of 64, {_PACED} a second, {_VERSIONS} versions a second: {name}", took, "ms", most)
            for name, took, most in zip(("p50", "p99"), paced.tolist(), (4.0, 12.0), strict=True)
        ),
        compare("commits with ten followers, against none", "commits/s", commits["ten"], commits["none"], 0.97),
        Row.at_most(f"memory of a follower, a row of {DIM} float32", bytes_a_row, "bytes", 1.3 * 4 * DIM + 24),
    ]
    publish("predictions", "Predictions over HTTP", rows)


def _at_least(name: str, figures: Sequence[float], unit: str, least: float) -> Row:
    value = statistics.median(figures)
    return Row(name, value, unit, least, value / least, 1.0)


# The client


def _ids(records: int) -> list[npt.NDArray[np.int64]]:
    return list(np.random.default_rng(records).integers(0, _ROWS, (64, records, FEATURES)))


def _predict(ids: npt.NDArray[np.int64]) -> bytes:
    return _request("/v1/models/clicks:predict", json.dumps({"instances": ids.tolist()}).encode())


def _infer(ids: npt.NDArray[np.int64]) -> bytes:
    sized = {"binary_data_size": ids.nbytes}
    given = {"name": "ids", "shape": ids.shape, "datatype": "INT64", "parameters": sized}
    head = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
    length = f"Inference-Header-Content-Length: {len(head)}\r\n"
    return _request("/v2/models/clicks/infer", head + ids.tobytes(), length)


def _request(path: str, body: bytes, header: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n{header}\r\n".encode() + body


def _load(server: tuple[str, int], requests: Sequence[bytes], connections: int) -> Sequence[float]:
    """Requests a second over so many connections, each of which waits for its answer; and the median seconds of one."""
    took: list[float] = []
    with ExitStack() as held:
        ready = held.enter_context(closing(select.epoll()))
        open_: dict[int, tuple[socket.socket, bytes, float]] = {}
        for number in range(connections):
            one = held.enter_context(socket.create_connection(server))
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ready.register(one, select.EPOLLIN)
            open_[one.fileno()] = (one, b"", time.perf_counter())
            one.sendall(requests[number % len(requests)])
        began = time.perf_counter()
        while len(took) < connections or time.perf_counter() < began + _SECONDS:
            for descriptor, _ in ready.poll(1.0):
                one, so_far, sent = open_[descriptor]
                so_far += one.recv(1 << 18)
                now = time.perf_counter()
                if _is_whole(so_far):
                    took.append(now - sent)
                    one.sendall(requests[len(took) % len(requests)])
                    so_far, sent = b"", now
                open_[descriptor] = (one, so_far, sent)
        return len(took) / (time.perf_counter() - began), statistics.median(took)


def _paced(server: tuple[str, int], requests: Sequence[bytes], connections: int = 32) -> list[float]:
    """Seconds from the moment that each request was due until its answer was there, at a steady rate."""
    took, sent, total = list[float](), 0, round(_PACED * _PACED_S)
    with ExitStack() as held:
        idle = [held.enter_context(socket.create_connection(server)) for _ in range(connections)]
        busy: dict[socket.socket, tuple[bytes, float]] = {}
        began = time.perf_counter()
        while len(took) < total:
            due = began + sent / _PACED
            if sent < total and idle and due <= time.perf_counter():
                one = idle.pop(0)  # in turns: the server ends what is silent for long
                one.sendall(requests[sent % len(requests)])
                busy[one], sent = (b"", due), sent + 1
                continue
            wait = due - time.perf_counter() if sent < total and idle else 1.0
            for one in select.select(list(busy), [], [], max(0.0, wait))[0]:
                so_far, was_due = busy[one]
                if not (piece := one.recv(1 << 18)):
                    raise SystemExit("the server has closed a connection with a request under way")
                so_far += piece
                busy[one] = (so_far, was_due)
                if _is_whole(so_far):
                    took.append(time.perf_counter() - was_due)
                    del busy[one]
                    idle.append(one)
    return took


def _address(process: Popen[str]) -> tuple[str, int]:
    return "127.0.0.1", int(line_of(process).rstrip("/").rpartition(":")[2])


def _commits(followers: int) -> float:
    """One by the median seconds of a commit, paced, to a store that so many processes follow."""
    import elastable as et
    from elastable.embedding_store import TableUpdate
    from elastable.embedding_store.wire.server.grpc_server import GrpcServer
    from elastable.embedding_store.wire.service.store_service import store_service

    random, took = np.random.default_rng(0), list[float]()
    with ExitStack() as held:
        home = held.enter_context(tempfile.TemporaryDirectory())
        store = held.enter_context(et.open_store(f"memory?log={home}/log"))
        store.create_table(et.TableSpec("rows", DIM, optimizer=et.OptimizerSpec("adagrad")))
        server = held.enter_context(GrpcServer("127.0.0.1:0", [store_service(store)]))
        children = [held.enter_context(child(_SELF, "--hang-on", f"grpc://{server.address}")) for _ in range(followers)]
        for each in children:
            line_of(each)
        gradients = random.standard_normal((512 * FEATURES, DIM)).astype(np.float32)
        for _ in range(_COMMITS):
            update = {"rows": TableUpdate(random.integers(0, _ROWS, len(gradients)), gradients)}
            began = time.perf_counter()
            store.update(update, {"rows": 0.1})
            took.append(time.perf_counter() - began)
            time.sleep(max(0.0, 1 / _VERSIONS - took[-1]))
    return 1 / statistics.median(took)


def _is_whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    if found and not head.startswith(b"HTTP/1.1 200"):
        raise SystemExit(answer.decode())
    return bool(found) and len(body) == int(head.lower().partition(b"\ncontent-length:")[2].split()[0])


def _of_child(process: Popen[str]) -> Sequence[float]:
    assert process.stdin is not None
    print("go", file=process.stdin, flush=True)
    return float(line_of(process)), 0.0


# Children


def _train(url: str) -> None:
    import keras

    import elastable as et
    from benchmarks.click_job.model import click_model
    from elastable.embedding_store import TableUpdate

    ids = np.random.default_rng(0).integers(0, _ROWS, (16_384, FEATURES))
    model = click_model([et.Embedding(None, DIM, name="features")], "Adagrad")
    fit = partial(et.fit, model, ids, ids[:, :1] % 2, store=url, batch_size=512, verbose=0)
    fit()
    with et.open_store(f"{url}?namespace=held") as store:
        store.create_table(et.TableSpec("rows", DIM, optimizer=et.OptimizerSpec("sgd")))
        for some in np.array_split(np.arange(_HELD_ROWS), 100):
            rows = store.lookup({"rows": some})["rows"]
            store.update({"rows": TableUpdate(some, rows)}, {"rows": 0.1})
    print("trained", flush=True)
    sys.stdin.readline()
    paced = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: print("0", flush=True),
        on_train_batch_end=lambda batch, logs: time.sleep(1 / _VERSIONS),
    )
    fit(initial_epoch=1, epochs=100, callbacks=[paced])


def _keras() -> None:
    import keras

    from benchmarks.click_job.model import click_model

    model = click_model([keras.layers.Embedding(_ROWS, DIM)], "Adagrad")
    batches = _ids(64)
    model.predict_on_batch(batches[0])
    print("ready", flush=True)
    for _ in sys.stdin:
        done, began = 0, time.perf_counter()
        while time.perf_counter() < began + _SECONDS:
            model.predict_on_batch(batches[done % len(batches)])
            done += 1
        print(64 * done / (time.perf_counter() - began), flush=True)


def _follow(url: str) -> None:
    from elastable.embedding_store.open_store import open_follower

    with closing(open_follower(url)) as reader:  # what the process itself needs comes first
        reader.lookup({"features": np.arange(3)})
    before = own_memory()
    with closing(open_follower(f"{url}?namespace=held")) as reader:
        assert reader.lookup({"rows": np.arange(3)})["rows"].shape == (3, DIM)
        print((own_memory() - before) / _HELD_ROWS, flush=True)


def _hang_on(url: str) -> None:
    from elastable.embedding_store.open_store import open_follower

    with closing(open_follower(url)) as reader:
        print("following", flush=True)
        while True:
            reader.advance()
            time.sleep(0.02)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    words = sys.argv[1:]
    if words[:1] == ["--train"]:
        _train(words[1])
    elif words[:1] == ["--keras"]:
        _keras()
    elif words[:1] == ["--follow"]:
        _follow(words[1])
    elif words[:1] == ["--hang-on"]:
        _hang_on(words[1])
    else:
        main()
