"""The jobs: each is a function of a separate folder, and returns the arrays that its processes have left there."""

import os
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np

import elastable as et
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from tests.elastable.processes import elastable, run_elastable
from tests.ports import free_address
from tests.same_bits.arrays import Arrays, checkpoint_arrays, history_arrays, nudged, table_arrays
from tests.servers import redis_binary, running_server, valkey_binary

MODEL = Path(__file__).with_name("model_file.py")
_SIZES = ("--workers", "2", "--micro-batch-size", "16", "--grads-to-wait", "2", "--epochs", "2")
_JOB: tuple[str | Path, ...] = (*_SIZES, "--seed", "3", "--full-every", "1", "--no-export")


def _done(*words: str | Path, env: dict[str, str] | None = None) -> None:
    ran = run_elastable(*words, env=env)
    assert ran.code == 0, f"elastable {' '.join(map(str, words))} ended with {ran.code}:\n{ran.out}\n{ran.err}"


def _trained(home: Path, model: str, *more: str | Path, predicts: bool = False) -> Arrays:
    """What `elastable train` leaves; of an option in `more` that is in `_JOB`, too, the last one counts."""
    env = {"SAME_BITS_MODEL": model}
    _done("train", MODEL, *_JOB, "--run-dir", home, "--checkpoint-dir", home / "saved", *more, env=env)
    arrays = checkpoint_arrays(home / "saved") | history_arrays(home / "latest" / "metrics.jsonl")
    if predicts:
        _done("predict", MODEL, "--checkpoint", home / "saved", "--output", home / "predicted.npy", env=env)
        arrays["predictions"] = np.load(home / "predicted.npy")
    return arrays


def memory(home: Path) -> Arrays:
    return _trained(home, "adam", predicts=True)


def files(home: Path) -> Arrays:
    """A table with admission, eviction and rows in bfloat16."""
    return _trained(home, "members", "--store", f"file://{home}/rows?budget=1MiB")


def in_redis(home: Path) -> Arrays:
    binary = redis_binary() or valkey_binary()
    assert binary is not None, "no redis-server or valkey-server"
    with running_server(binary, home / "server") as server:
        arrays = _trained(home, "momentum", "--store", f"{server.url}?flush=0.02")
        with et.open_store(server.url) as store:
            for table in ("users", "words"):
                arrays |= table_arrays(f"redis/{table}", store.scan(table))
    return arrays


def every_row(home: Path) -> Arrays:
    """`lazy=False`, and checkpoints, which end replay epochs of steps."""
    return _trained(home, "every-row", "--checkpoint-every", "5")


def store_servers(home: Path) -> Arrays:
    return _trained(home, "clipped", "--stores", "2")


def async_one_worker(home: Path) -> Arrays:
    return _trained(home, "adam", "--mode", "async", "--workers", "1", "--grads-to-wait", "1")


def by_encoding(home: Path) -> Arrays:
    return _trained(home, "momentum", "--store", "encoding:memory,memory", "--transport", "grpc")


def two_locations(home: Path) -> Arrays:
    """One table in files, one in memory; moving averages."""
    file = home / "locations.toml"
    file.write_text(f'[stores]\nfile = "file://{home}/rows"\n[overrides]\nusers = "file"\nwords = "memory"\n')
    return _trained(home, "average", "--locations", file)


def resumed(home: Path) -> Arrays:
    """The master is killed between two checkpoints; the job goes on, ends, and goes on for one more epoch."""
    words = ("--run-dir", home, "--checkpoint-dir", home / "saved", "--checkpoint-every", "3")
    dies = {"SAME_BITS_MODEL": "clipped", "SAME_BITS_DIES_AT": "11"}
    killed = run_elastable("train", MODEL, *_JOB, *words, env=dies)
    assert killed.code == -9, killed.err
    _trained(home, "clipped", "--checkpoint-every", "3", "--resume")
    return _trained(home, "clipped", "--checkpoint-every", "3", "--resume", "--epochs", "3")


def int8_rows(home: Path) -> Arrays:
    """A checkpoint restored for serving."""
    trained = _trained(home, "clipped", "--epochs", "1")
    url = f"file://{home}/served"
    _done("checkpoint", "restore", home / "saved", "--store", url, "--dtype", "int8")
    with et.open_store(url) as store:
        return trained | table_arrays("users", store.scan("users")) | table_arrays("words", store.scan("words"))


def _program(name: str, replicas: int = 1) -> Callable[[Path], Arrays]:
    """A job of `tests.same_bits.programs`."""

    def job(home: Path) -> Arrays:
        _done("replicas", "-n", str(replicas), "-m", "tests.same_bits.programs", name, home)
        arrays: Arrays = {}
        for file in sorted(home.glob("rank-*.npz")):
            with np.load(file) as found:
                arrays |= {f"{file.stem}/{key}": found[key] for key in found.files}
        return arrays

    return job


def host_embeddings(home: Path) -> Arrays:
    """The callbacks ask an `elastable serve`."""
    address = free_address()
    (home / "address").write_text(f"grpc://{address}")
    with elastable(home, "serve", "--listen", address, "--store", "memory"):
        return _program("host-embeddings", 2)(home)


def graph_schemes(home: Path) -> Arrays:
    """One knowledge-graph model by each scheme, on two workers."""
    graph = home / "graph"
    graph.mkdir()
    lines = [f"e{a}\tr{k}\te{(a * (k + 2) + k) % 24}\n" for k in range(3) for a in range(24)]
    for name, some in (("train", lines[:56]), ("valid", lines[56:64]), ("test", lines[64:])):
        (graph / f"{name}.txt").write_text("".join(some))
    rate = repr(float(nudged(np.array([0.1]))[0]))
    common = ("--model", "ComplEx", "--workers", "2", "--dim", "8", "--epochs", "4", "--batch", "16")
    sampled = ("--loss", "log-sigmoid", "--negatives", "6", "--per-triple", "--filtered")
    schemes = {
        "score-moving": (*sampled, "--scheme", "score-moving"),
        "embedding-moving": (*sampled, "--scheme", "embedding-moving"),
        "whole-softmax": ("--loss", "whole-softmax"),
        "kvsall": ("--loss", "kvsall"),
    }
    arrays: Arrays = {}
    for name, words in schemes.items():
        run = home / name
        _done("kg", "train", graph, *common, *words, "--learning-rate", rate, "--run-dir", run)
        saved = checkpoint_arrays(run / "latest" / "checkpoints")
        # The file of the tensors was model.safetensors, before graphs had the checkpoints of all jobs.
        arrays |= {f"{name}/{key.replace('dense/', 'model/')}": value for key, value in saved.items()}
        arrays |= {f"{name}/{k}": value for k, value in history_arrays(run / "latest" / "metrics.jsonl").items()}
    return arrays


def repeated_push(home: Path) -> Arrays:
    """A client's third push is sent again after `elastable serve` was killed and started again."""
    address = free_address()
    command = ("serve", "--listen", address, "--store", f"file://{home}/rows?fsync=always")
    optimizer = store_pb2.Optimizer(name="adagrad", hyperparameters={"learning_rate": 0.1})
    initial = store_pb2.Initializer(kind="uniform", a=-0.05, b=0.05)
    spec = store_pb2.TableSpec(name="rows", dim=4, initializer=initial, optimizer=optimizer)
    random = np.random.default_rng(4)
    pushes = [(random.integers(-9, 9, 12), nudged(random.normal(size=(12, 4)))) for _ in range(4)]
    replies: list[tuple[int, int]] = []

    def push(channel: grpc.Channel, number: int) -> None:
        ids, values = pushes[number]
        part = store_pb2.RowPart(slices=[store_pb2.SlicesEntry(table="rows", count=len(ids), dim=4)])
        header = store_pb2.RowPushHeader(sender="a client", micro_batch=number + 1, parts=[part])
        frame = store_pb2.RowPushFrame(header=header, body=ids.astype("<i8").tobytes() + values.tobytes())
        reply = store_pb2_grpc.StoreStub(channel).PushRows(iter([frame]), timeout=60, wait_for_ready=True)
        replies.append((reply.outcome, reply.version))

    for life, numbers in enumerate(((0, 1, 2), (2, 3, 3))):
        with elastable(home, *command, name=f"serve-{life}"), grpc.insecure_channel(address) as channel:
            stub = store_pb2_grpc.StoreStub(channel)
            stub.CreateTable(store_pb2.CreateTableRequest(spec=spec), timeout=60, wait_for_ready=True)
            for number in numbers:
                push(channel, number)
            with et.open_store(f"grpc://{address}") as store:
                arrays = table_arrays("rows", store.scan("rows"))
    return {"told": np.array(replies), **arrays}


def refused(home: Path) -> Arrays:
    """Exit codes of command lines that are refused."""
    (home / "empty.py").write_text("")
    train: tuple[str | Path, ...] = ("train", MODEL, *_JOB, "--run-dir", home)
    lines: dict[str, tuple[tuple[str | Path, ...], str]] = {
        "no such option": (("--version",) if os.environ.get("SAME_BITS_NUDGE") else ("train", "--no-such"), ""),
        "no epochs": (("train", MODEL, "--epochs", "0"), ""),
        "no such store": ((*train, "--store", "ftp://here"), ""),
        "no model file": (("train", home / "missing.py", "--run-dir", home), ""),
        "no model": (("train", home / "empty.py", "--run-dir", home), ""),
        "ids outside": (train, "outside"),
        "lazy and a regularizer": (train, "unsupported"),
        "locations and servers": ((*train, "--stores", "2", "--locations", home / "missing.toml"), ""),
        "no master": (("lookup", "users", "1", "--master", free_address(), "--deadline", "1"), ""),
        "no checkpoint": (("checkpoint", "show", home / "nothing"), ""),
        "no graph": (("kg", "train", home / "nothing", "--run-dir", home), ""),
        "no program": (("replicas", "-n", "2", home / "missing.py"), ""),
    }
    return {
        name: np.array(run_elastable(*words, env={"SAME_BITS_MODEL": model}).code)
        for name, (words, model) in lines.items()
    }


JOBS: dict[str, Callable[[Path], Arrays]] = {
    "memory": memory,
    "files": files,
    "redis": in_redis,
    "every-row": every_row,
    "store-servers": store_servers,
    "async": async_one_worker,
    "encoding": by_encoding,
    "locations": two_locations,
    "resumed": resumed,
    "int8": int8_rows,
    "tables": _program("tables"),
    "masks": _program("masks"),
    "dlrm": _program("dlrm"),
    "host-embeddings": host_embeddings,
    "sharded": _program("sharded", 2),
    "graph-schemes": graph_schemes,
    "repeated-push": repeated_push,
    "refused": refused,
}
