"""What fuzzing found without a name: documents, addresses and replies that make no sense are errors of ours."""

import json

import hiredis
import pytest

from elastable.embedding_store.contract.spec import TableSpec, spec_from_json, spec_to_json
from elastable.embedding_store.errors import BadSpec, StoreBroken, StoreFailed
from elastable.embedding_store.tiers.redis.record_transfer import RecordTable
from elastable.embedding_store.tiers.redis.redis_tier import TierState
from elastable.embedding_store.tiers.redis.reply_shapes import Command, require_shapes
from elastable.embedding_store.tiers.redis.stream_records import read_ends

PLAIN = json.loads(spec_to_json(TableSpec("t", 2)))


@pytest.mark.parametrize("name", [None, 1.5, True, ["a"], {"a": 1}])
def test_a_table_whose_name_is_no_text(name: object) -> None:
    with pytest.raises(BadSpec, match="no table spec"):
        spec_from_json(json.dumps({**PLAIN, "name": name}))


@pytest.mark.parametrize("text", ['{"partitions": Infinity, "spec": ' + json.dumps(PLAIN) + "}", "[" * 100_000, "3"])
def test_a_registry_with_numbers_or_depths_that_no_machine_has(text: str) -> None:
    with pytest.raises(StoreBroken, match="no table"):
        RecordTable.from_json("n", b"t", text.encode())


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
