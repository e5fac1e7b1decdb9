"""`elastable serve-model`: requests and records a second, next to `predict_on_batch` of the plain Keras model.

Server, Redis and client share this machine. The click model of 26 ids a record; each request has other ids.

    python -m benchmarks.calls.predictions
"""

import json
import os
import select
import socket
import statistics
import sys
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
_SELF = "benchmarks.calls.predictions"


def main() -> None:
    """Measures, prints and writes `results/predictions.json`."""
    with ExitStack() as held:
        url = held.enter_context(redis_server()).url
        with child(_SELF, "--train", url) as trained:
            line_of(trained)
        said = line_of(held.enter_context(child("elastable", "serve-model", url, "--http", "127.0.0.1:0")))
        server = ("127.0.0.1", int(said.rstrip("/").rpartition(":")[2]))
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
    rates = {name: [each[0] for each in found] for name, found in figures.items()}
    batches = [64 * each for each in rates["batches"]]
    rows = [
        _at_least("requests of one record (JSON), 16 connections", rates["records"], "requests/s", 1_500),
        _at_least("records in requests of 64 (binary), 8 connections", batches, "records/s", 40_000),
        compare("the same, against predict_on_batch of plain Keras at 64", "records/s", batches, rates["keras"], 0.7),
        Row("one client, one record: p50", 1e6 * statistics.median(each[1] for each in figures["one client"]), "us"),
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
    import elastable as et
    from benchmarks.click_job.model import click_model
    from elastable.embedding_store import TableUpdate

    ids = np.random.default_rng(0).integers(0, _ROWS, (16_384, FEATURES))
    model = click_model([et.Embedding(None, DIM, name="features")], "Adagrad")
    et.fit(model, ids, ids[:, :1] % 2, store=url, batch_size=512, verbose=0)
    with et.open_store(f"{url}?namespace=held") as store:
        store.create_table(et.TableSpec("rows", DIM, optimizer=et.OptimizerSpec("sgd")))
        for ids in np.array_split(np.arange(_HELD_ROWS), 100):
            rows = store.lookup({"rows": ids})["rows"]
            store.update({"rows": TableUpdate(ids, rows)}, {"rows": 0.1})
    print("trained", flush=True)


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


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    words = sys.argv[1:]
    if words[:1] == ["--train"]:
        _train(words[1])
    elif words[:1] == ["--keras"]:
        _keras()
    elif words[:1] == ["--follow"]:
        _follow(words[1])
    else:
        main()
