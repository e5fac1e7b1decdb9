"""Before-images hold what was read, to the byte, and what is none is refused."""

from __future__ import annotations

from typing import cast

import hiredis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.tiers.redis.before_images import Moment, before_bytes, decode_before, encode_before
from elastable.embedding_store.tiers.redis.catalog import Catalog
from elastable.embedding_store.tiers.redis.more_commands import MoreCommands
from elastable.embedding_store.tiers.redis.resp_answers import parse_answer
from elastable.embedding_store.tiers.redis.row_update import block_with_slots
from elastable.embedding_store.tiers.redis.schema import partition_of
from elastable.embedding_store.tiers.redis.schema_1 import TableRecord

IDS = st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=30)


def commands_in(more: MoreCommands) -> list[list[bytes]]:
    """The commands that were encoded."""
    answers: list[list[bytes]] = []
    at = 0
    while at < more.at[-1]:
        parsed = parse_answer(more.text, at, int(more.at[-1]))
        assert parsed is not None
        answers.append(cast(list[bytes], parsed[0]))
        at = parsed[1]
    return answers


@given(IDS, IDS, st.randoms(use_true_random=False), st.sampled_from(["adagrad", "sgd"]), st.booleans())
def test_there_and_back(
    ids: list[int], others: list[int], random: np.random.Generator, optimizer: str, left: bool
) -> None:
    specs = [
        TableSpec("t", 3, None, optimizer=OptimizerSpec.of(optimizer)),
        TableSpec("u", 2, None, dtype="bfloat16", optimizer=OptimizerSpec.of("adam")),
    ]
    catalog = Catalog.of("n", [TableRecord(spec, 4) for spec in specs])
    block = block_with_slots(catalog, {"t": np.array(ids, np.int64), "u": np.array(others, np.int64)})
    block.rows[:] = np.frombuffer(random.randbytes(len(block.rows)), np.uint8)  # type: ignore[attr-defined]
    for rows in block.tables.values():
        rows.no_weights[:] = [random.random() < 0.4 for _ in rows.ids]
    name = Moment(7, 2**40)
    stamps = np.arange(len(block.weights)) + 3
    drops = stamps % 2 == 0
    more = encode_before(block, stamps, name, drops, left)
    assert more.count.tolist() == (1 + drops).tolist()
    commands, size = commands_in(more), 0
    for c, partition in enumerate(block.weights["key"].tolist()):
        table = "t" if partition < 4 else "u"
        rows, spec = block.tables[table], specs[table == "u"]
        key = catalog.names[partition][2]
        if drops[c]:
            assert commands.pop(0) == [b"UNLINK", key]
        hset, to, field, value, *beside = commands.pop(0)
        assert (hset, to, field) == (b"HSET", key, name.weights_field)
        slot_bytes = 4 * rows.slots.shape[1]
        assert beside[:1] == ([name.slots_field] if slot_bytes else [])
        image = decode_before(value, spec.weight_bytes, beside[1] if beside else None, slot_bytes)
        assert (image.stamp, image.left) == (stamps[c], left)
        mine = {int(one): at for at, one in enumerate(rows.ids) if partition_of(np.array([one]), 4)[0] == partition % 4}
        assert sorted(image.ids.tolist()) == sorted(mine)
        packed = rows.weights.view(np.uint8) if rows.packed is None else rows.packed
        for at, one in enumerate(image.ids.tolist()):
            assert bool(rows.no_weights[mine[one]]) == (at >= image.held)
            if at < image.held:
                assert image.weights[at].tobytes() == packed.reshape(len(rows.ids), -1)[mine[one]].tobytes()
                if slot_bytes:
                    assert image.slots[at].tobytes() == rows.slots[mine[one]].tobytes()
        size += len(value) + sum(map(len, beside[1:]))
    assert commands == []
    assert before_bytes(block) == (len(ids) + len(others), size)
    assert Moment.of_field(name.weights_field) == name


@pytest.mark.parametrize("value", [b"", bytes(31), bytes(33), b"\xff" * 32, np.array([1, 1, 0, 1]).tobytes()])
def test_what_is_none_is_refused(value: bytes) -> None:
    with pytest.raises(StoreFailed, match="is none of rows of 12 bytes"):
        decode_before(value, 12)


@given(
    st.recursive(st.none() | st.integers(-(2**62), 2**62) | st.binary(max_size=20), st.lists, max_leaves=8), st.data()
)
def test_answers_cut_anywhere(value: object, data: st.DataObject) -> None:
    text = resp(value)
    received = np.frombuffer(b"xx" + text + b"yy", np.uint8)
    assert parse_answer(received, 2, len(received)) == (value, 2 + len(text))
    cut = data.draw(st.integers(0, len(text) - 1))
    assert parse_answer(received, 2, 2 + cut) is None


def resp(value: object) -> bytes:
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%s\r\n" % (len(value), value)
    assert isinstance(value, list)
    return b"*%d\r\n" % len(value) + b"".join(map(resp, value))


def test_errors_and_what_is_no_answer() -> None:
    received = np.frombuffer(b"-ERR no\r\n+OK\r\n?\r\n", np.uint8)
    error, behind = parse_answer(received, 0, len(received)) or (None, 0)
    assert isinstance(error, hiredis.ReplyError)
    assert (str(error), behind) == ("ERR no", 9)
    assert parse_answer(received, 9, len(received)) == (b"OK", 14)
    with pytest.raises(StoreFailed, match="no reply"):
        parse_answer(received, 14, len(received))
