"""What fuzzing found without a name: documents, addresses and replies that make no sense are errors of ours."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import hiredis
import numpy as np
import pytest

from elastable.embedding_store.contract.spec import TableSpec, spec_from_json, spec_to_json
from elastable.embedding_store.errors import BadInput, BadSpec, StoreBroken, StoreFailed
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command, require_shapes
from elastable.embedding_store.tiers.redis.records.record_replies import Awaited, RecordReplies, WriteReplies
from elastable.embedding_store.tiers.redis.records.record_requests import PART
from elastable.embedding_store.tiers.redis.records.record_transfer import RecordTable
from elastable.embedding_store.tiers.redis.records.tier_registry import TierState
from elastable.embedding_store.tiers.redis.streams.stream_records import read_ends

PLAIN = json.loads(spec_to_json(TableSpec("t", 2)))


@pytest.mark.parametrize("name", [None, 1.5, True, ["a"], {"a": 1}])
def test_a_table_whose_name_is_no_text(name: object) -> None:
    with pytest.raises(BadSpec, match="no table spec"):
        spec_from_json(json.dumps({**PLAIN, "name": name}))


@pytest.mark.parametrize("text", ['{"partitions": Infinity, "spec": ' + json.dumps(PLAIN) + "}", "[" * 100_000, "3"])
def test_a_registry_with_numbers_or_depths_that_no_machine_has(text: str) -> None:
    with pytest.raises(StoreBroken, match="no table"):
        RecordTable.from_json("n", b"t", text.encode())


def test_a_port_of_thousands_of_digits() -> None:
    with pytest.raises(BadInput, match="not a number from 0 to 65535"):
        Address.parse("host:" + "9" * 5_000)


@pytest.mark.parametrize(
    "reply",
    [
        b":" + b"9" * 5_000 + b"\r\n",
        b"*1\r\n" * 5_000,
        b"*" + b"1" * 40 + b"\r\n",
        b"*2\r\n$-2\r\n",
        b"*2\r\n$8\r\n" + bytes(8) + b"\r\n$" + b"9" * 40 + b"\r\n",
        b"-" + b"e" * 100_000,
    ],
)
def test_numbers_and_depths_of_a_reply_to_a_read(reply: bytes) -> None:
    awaited = Awaited(_one_part(), np.arange(1), 8, np.zeros((1, 8), np.uint8), np.zeros(1, np.uint8), np.zeros(1, int))
    content = np.frombuffer(reply, np.uint8)
    with pytest.raises(StoreFailed, match="a reply "):
        RecordReplies([awaited]).feed(content, 0, len(content))


@pytest.mark.parametrize("reply", [b"$1\r\n", b":1\r\n*1\r\n", b":1\r\n:1\r\n:1\r\n", b"\r\n"])
def test_lines_that_answer_no_write(reply: bytes) -> None:
    content = np.frombuffer(reply, np.uint8)
    with pytest.raises(StoreFailed, match="a reply to a write is not one that was asked for"):
        WriteReplies(_one_part()).feed(content, 0, len(content))


def _one_part() -> np.ndarray:
    parts = np.zeros(1, PART)
    parts["rows"] = 1
    return parts


@pytest.mark.parametrize(
    ("command", "right", "wrong"),
    [
        (("GET", b"k"), [None, b"1"], [1, [b"1"]]),
        (("HLEN", b"k"), [0, 7], [b"7", None, -1]),
        (("HGETALL", b"k"), [[], [b"a", b"b"]], [[b"a"], [1, 2], b"a", None]),
        (("HKEYS", b"k"), [[b"a"]], [[None], 3]),
        (("HMGET", b"k", b"a", b"b"), [[b"x", None]], [[b"x"], [b"x", 1], [b"x"] * 3]),
        (("HSCAN", b"k", b"0"), [[b"0", [b"a", b"b"]]], [[b"0"], [0, []], [b"0", [b"a"]]]),
        (("INFO", "cluster"), [b"cluster_enabled:0"], [0, None, []]),
        (("CLUSTER", "SLOTS"), [[], [[0, 5, [b"host", 1]]]], [[[0, 5]], [[0, b"5", [b"h", 1]]], [3], None]),
        (("CLIENT", "LIST"), [b"id=1"], [1]),
        (("CLIENT", "KILL", "ID", "1"), [0], [b"0"]),
    ],
)
def test_replies_have_the_shapes_of_their_commands(command: Command, right: list[object], wrong: list[object]) -> None:
    for reply in [*right, hiredis.ReplyError("ERR no")]:
        require_shapes([command], [reply], "here")
        require_shapes([("MULTI",), command, ("EXEC",)], [b"OK", b"QUEUED", [reply]], "here")
    for reply in wrong:
        with pytest.raises(StoreFailed, match=f"here answered {command[0]!s} with"):
            require_shapes([command], [reply], "here")
        with pytest.raises(StoreFailed, match="here answered EXEC with"):
            require_shapes([("MULTI",), command, ("EXEC",)], [b"OK", b"QUEUED", [reply]], "here")


@pytest.mark.parametrize("name", [b"lost:t", b"stamps:t", b"stamps:\xff"])
def test_a_state_of_the_tier_that_is_none(name: bytes) -> None:
    with pytest.raises(StoreBroken, match="state of the tier in Redis is corrupt"):
        TierState.of([name, b"text"])


@pytest.mark.parametrize("answers", [[[b"a"], [b"b"]], [[[b"1-0", b"x"]]] * 2, [[[b"9" * 99]]] * 2])
def test_ends_of_a_log_that_are_none(answers: list[object]) -> None:
    with pytest.raises(StoreFailed):
        read_ends(answers, "the log")


@contextmanager
def _lying(answer: Callable[[bytes], bytes]) -> Iterator[int]:
    """A server that answers every command with what `answer` says of it; its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(client,), daemon=True).start()

    def talk(client: socket.socket) -> None:
        reader = hiredis.Reader()
        with client:
            while said := client.recv(1 << 16):
                reader.feed(said)
                while (command := reader.gets()) is not False:
                    client.sendall(answer(command[0].upper()))

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize("said", [b":7\r\n", b"$4\r\ntext\r\n", b"*2\r\n:1\r\n:2\r\n", b"*0\r\n", b"-ASK 1 x\r\n"])
def test_a_server_that_answers_everything_alike_is_refused_by_name(said: bytes) -> None:
    with (
        _lying(lambda command: b"+PONG\r\n" if command == b"PING" else said) as port,
        pytest.raises(StoreFailed),
        open_store(f"redis://127.0.0.1:{port}?deadline=30") as store,
    ):
        store.create_table(TableSpec("t", 2))
