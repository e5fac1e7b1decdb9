"""What fuzzing found without a name: documents, addresses and replies that make no sense are errors of ours."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hiredis
import numpy as np
import pytest

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.spec_json import spec_from_json, spec_to_json
from elastable.embedding_store.errors import BadInput, BadSpec, ElastableError, StoreFailed
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from elastable.embedding_store.tiers.redis.registry import Registry, version_of
from elastable.embedding_store.tiers.redis.reply_shapes import require_shapes
from elastable.embedding_store.tiers.redis.resp_answers import parse_answer
from elastable.embedding_store.tiers.redis.resp_replies import ChangeReplies
from elastable.embedding_store.tiers.redis.schema_1 import TableRecord

PLAIN = json.loads(spec_to_json(TableSpec("t", 2)))


@pytest.mark.parametrize("name", [None, 1.5, True, ["a"], {"a": 1}])
def test_a_table_whose_name_is_no_text(name: Any) -> None:
    with pytest.raises(BadSpec, match="no table spec"):
        spec_from_json(json.dumps({**PLAIN, "name": name}))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"partitions": Infinity, "spec": ' + json.dumps(PLAIN) + "}", StoreFailed),
        ("[" * 100_000, StoreFailed),
        ("3", StoreFailed),
    ],
)
def test_a_table_record_with_numbers_or_depths_that_no_machine_has(text: str, kind: type[ElastableError]) -> None:
    with pytest.raises(kind, match="no table record"):
        TableRecord.from_json(text)


def test_a_port_of_thousands_of_digits() -> None:
    with pytest.raises(BadInput, match="not a number from 0 to 65535"):
        Address.parse("host:" + "9" * 5_000)


@pytest.mark.parametrize("reply", [b":" + b"9" * 5_000 + b"\r\n", b"*1\r\n" * 5_000, b"*" + b"1" * 40 + b"\r\n"])
def test_numbers_and_depths_of_a_redis_reply(reply: bytes) -> None:
    content = np.frombuffer(reply, np.uint8)
    with pytest.raises(StoreFailed, match="no reply to what was asked"):
        parse_answer(content, 0, len(content))


def test_an_exec_of_thousands_of_digits_is_a_failure_of_its_change() -> None:
    replies = ChangeReplies(np.array([1], np.int64))
    content = np.frombuffer(b"+OK\r\n+QUEUED\r\n*" + b"9" * 5_000 + b"\r\n", np.uint8)
    replies.feed(content, 0, len(content))
    assert list(replies.failures) == [0]


@pytest.mark.parametrize(
    ("command", "right", "wrong"),
    [
        (("GET", b"k"), [None, b"1"], [1, [b"1"]]),
        (("HLEN", b"k"), [0, 7], [b"7", None, -1]),
        (("HGETALL", b"k"), [[], [b"a", b"b"]], [[b"a"], [1, 2], b"a", None]),
        (("HKEYS", b"k"), [[b"a"]], [[None], 3]),
        (("HMGET", b"k", b"a", b"b"), [[b"x", None]], [[b"x"], [b"x", 1], [b"x"] * 3]),
        (("HSCAN", b"k", b"0"), [[b"0", [b"a", b"b"]]], [[b"0"], [0, []], [b"0", [b"a"]]]),
        (("TIME",), [[b"1", b"2"]], [[b"1"], [b"a", b"2"], [b"9" * 5_000, b"1"]]),
        (("INFO", "cluster"), [b"cluster_enabled:0"], [0, None, []]),
        (("CLUSTER", "SLOTS"), [[], [[0, 5, [b"host", 1]]]], [[[0, 5]], [[0, b"5", [b"h", 1]]], [3], None]),
        (("CLIENT", "LIST"), [b"id=1"], [1]),
        (("CLIENT", "KILL", "ID", "1"), [0], [b"0"]),
    ],
)
def test_replies_have_the_shapes_of_their_commands(
    command: tuple[Any, ...], right: list[Any], wrong: list[Any]
) -> None:
    for reply in [*right, hiredis.ReplyError("ERR no")]:
        require_shapes([command], [reply], "here")
        require_shapes([("MULTI",), command, ("EXEC",)], [b"OK", b"QUEUED", [reply]], "here")
    for reply in wrong:
        with pytest.raises(StoreFailed, match=f"here answered {command[0]} with"):
            require_shapes([command], [reply], "here")
        with pytest.raises(StoreFailed, match="here answered EXEC with"):
            require_shapes([("MULTI",), command, ("EXEC",)], [b"OK", b"QUEUED", [reply]], "here")


@pytest.mark.parametrize("answers", [[], [b"1", b"o", b"0", [], 3], [b"1", 5, b"x", [], [b"1", b"2"]], [b"1"] * 5])
def test_a_registry_that_is_none(answers: list[Any]) -> None:
    with pytest.raises(StoreFailed):
        Registry.of(answers)


@pytest.mark.parametrize("answer", [b"text", [], b"9" * 5_000])
def test_a_version_that_is_none(answer: Any) -> None:
    with pytest.raises(StoreFailed, match="no version"):
        version_of(answer)


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
        RedisStore(f"redis://127.0.0.1:{port}?deadline=30") as store,
    ):
        store.create_table(TableSpec("t", 2))
