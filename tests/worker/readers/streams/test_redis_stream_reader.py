"""Events in Redis Streams: what a master asks, what workers read, and what is lost is missed."""

import io
import json
import re
import struct
import time
from collections.abc import Iterable, Iterator

import hypothesis
import numpy as np
import pyarrow as pa
import pytest
import redis
import tensorflow as tf
from hypothesis import strategies as st

import elastable as et
from elastable.embedding_store.errors import BadInput, StoreFailed, Unavailable
from elastable.embedding_store.tiers.redis.reply_shapes import require_shapes
from elastable.master.api import Span, Waiting
from elastable.worker.readers.batch.pytrees import named_parts
from elastable.worker.readers.batch.reader import ModelInputs
from elastable.worker.readers.streams import redis_stream_reader
from elastable.worker.readers.streams.event_reader import PayloadReader
from tests.contracts.readers import listed
from tests.contracts.streams import read, whole
from tests.untyped import Keyword

INPUTS = ModelInputs({"user": "int64", "price": "float32", "words": "string"}, own_step=False)


@pytest.fixture(params=["redis_url", "valkey_url"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def reader_of(url: str, key: str | list[str] = "clicks", **options: Keyword) -> et.RedisStreamReader:
    return et.RedisStreamReader(url, key, label="clicked", **options)


def send(client: redis.Redis, *events: object, key: str = "clicks") -> list[str]:
    made = [event if isinstance(event, bytes) else json.dumps(event) for event in events]
    return [_id(client.xadd(key, {"event": event})) for event in made]


def _id(entry: object) -> str:
    assert isinstance(entry, bytes)
    return entry.decode()


def event(user: object = 7, price: object = 1, words: object = ("a", "b"), clicked: object = 0) -> dict[str, object]:
    return {"user": user, "price": price, "words": words, "clicked": clicked, "other": None}


def test_a_server_that_names_more_entries_than_were_asked_for_is_refused(
    redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(client, event())
    greedy = redis_stream_reader._LISTING.replace("table.concat(ids, ' ')", "'1-0 2-0 3-0 4-0'")
    monkeypatch.setattr(redis_stream_reader, "_LISTING", greedy)
    with pytest.raises(StoreFailed, match="named 4 entries of 'clicks', of 3 asked for"):
        reader_of(redis_url).ahead({}, 2, None)


def test_what_waits_is_listed_with_its_lag(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        ids = send(client, *(event(user) for user in range(5)))
        reader = reader_of(url, ["clicks", "later"])
        found = reader.ahead({}, 3, None)
        assert list(found) == ["clicks"]
        assert found["clicks"].stops == [f"{each}/{number}" for number, each in enumerate(ids[:3], 1)]
        assert (found["clicks"].start, found["clicks"].more, found["clicks"].lag) == ("0-0/0", True, 5)
        assert found["clicks"].since == pytest.approx(time.time(), abs=60)
        send(client, event(), key="later")
        rest = reader.ahead({"clicks": found["clicks"].stops[-1]}, 3, None)
        assert [len(each.stops) for each in rest.values()] == [2, 1]
        assert [(each.more, each.lag) for each in rest.values()] == [(False, 2), (False, 1)]


def test_an_end_is_one_of_now_of_a_time_or_of_positions(redis_url: str, client: redis.Redis) -> None:
    for moment in (1_000, 2_000, 3_000):
        client.xadd("clicks", {"event": json.dumps(event())}, id=f"{moment}-5")
    reader = reader_of(redis_url, ["clicks", "later"])
    assert reader.ends() == {"clicks": "3000-5"}
    assert reader.ahead({}, 9, None)["clicks"].since is None  # such ids are no times of 1970
    for until, count in (({"clicks": "2000-5"}, 2), ({"clicks": "1999-0"}, 1), (reader.ends(3.0), 2), ({}, 0)):
        assert sum(len(each.stops) for each in reader.ahead({}, 9, until).values()) == count
    with pytest.raises(BadInput, match="there is no partition 'x' to end in"):
        reader.ahead({}, 1, {"x": "1-0"})
    with pytest.raises(BadInput, match="position 'five'"):
        reader.ahead({}, 1, {"clicks": "five"})


def test_columns_are_read_as_the_model_wants_them(redis_url: str, client: redis.Redis) -> None:
    send(client, event(), event(2**53 + 1, 0.5, (), 1), event(3.0, True, ("c",), 0.5))
    reader = reader_of(redis_url).for_inputs(INPUTS)
    assert reader.streams
    (x, y), bad = read(reader)
    assert bad == ()
    assert list(x) == ["user", "price", "words"]
    assert (x["user"].dtype, x["user"].tolist()) == (np.int64, [7, 2**53 + 1, 3])
    assert (x["price"].dtype, x["price"].tolist()) == (np.float32, [1.0, 0.5, 1.0])
    assert listed(x["words"]) == [["a", "b"], [], ["c"]]
    assert y.tolist() == [0.0, 1.0, 0.5]


BAD = {
    "no JSON": (b"{", "JSONDecodeError"),
    "no object": ([1], "a list, and no object of columns"),
    "no such column": ({"user": 1}, "no column 'price'; its columns are 'user'"),
    "a fraction as an id": (event(1.5), "column 'user'"),
    "text as an id": (event("7"), "column 'user'"),
    "an id beyond int64": (event(2**70), "column 'user'"),
    "a null id": (event(None), "column 'user'.*null"),
    "a list in place of a value": (event([1]), "column 'user'"),
    "a value in place of a list": (event(words="a"), "column 'words'"),
    "nested": (event(words=[["a"]]), "column 'words'"),
    "a price that is null": (event(price=None), "column 'price': null, NaN or Inf"),
    "a price beyond float32": (event(price=1e39), "column 'price': null, NaN or Inf"),
    "not UTF-8": (b'{"user": "\xff"}', "UnicodeDecodeError"),
}


def test_events_that_do_not_fit_are_passed_over_with_the_reason(redis_url: str, client: redis.Redis) -> None:
    ids = send(client, event(), *(each for each, _ in BAD.values()), event(9))
    other = _id(client.xadd("clicks", {"payload": "{}"}))
    reader = reader_of(redis_url).for_inputs(INPUTS)
    batch, bad = read(reader)
    assert batch[0]["user"].tolist() == [7, 9]
    assert sorted(each.position for each in bad) == sorted([*ids[1:-1], other])
    reasons = {each.position: each.reason for each in bad}
    for position, (_, reason) in zip(ids[1:-1], BAD.values(), strict=True):
        assert re.search(reason, reasons[position]), reasons[position]
    assert "has no field 'event'" in reasons[other]
    only_bad = [Span("clicks", f"{ids[0]}/1", f"{ids[1]}/2", 1)]
    assert reader.read(only_bad)[0] is None


NUMBERS = st.integers(-(2**64), 2**64) | st.integers(-9, 9) | st.floats()
VALUES = st.none() | st.booleans() | NUMBERS | st.text(max_size=3) | st.just([1])
TEXTS = st.lists(st.text(max_size=2), max_size=2)
EVENTS = st.builds(event, st.integers(-(2**63), 2**63 - 1), NUMBERS, TEXTS, NUMBERS) | st.builds(
    event, VALUES, VALUES, TEXTS | VALUES, VALUES
)
ODD = st.sampled_from([b"", b" ", b"{}", b"{", b'{"user": 1}{"user": 2}', b'{"user":\n1}', b"[]", b'"{}"', b"\xff"])
PAYLOADS = st.lists(EVENTS.map(lambda each: json.dumps(each).encode()) | ODD, max_size=4)


class Given(PayloadReader):
    """Events that are given."""

    def __init__(self, events: object, payloads: list[bytes]) -> None:
        super().__init__("given", 1, events, None, "clicked", None, None, None, None)  # type: ignore[arg-type]
        self._payloads = [json.dumps(event()).encode(), *payloads]

    def ahead(self, positions: object, most: int, until: object) -> dict[str, Waiting]:
        return {"all": Waiting("0", ["1"])}

    def ends(self, before: float | None = None) -> dict[str, str]:
        return {}

    def events(self, span: Span) -> list[tuple[int, bytes]]:
        return list(enumerate(self._payloads))

    def position(self, event: tuple[int, bytes]) -> str:
        return str(event[0])

    def payload(self, event: tuple[int, bytes]) -> bytes:
        return event[1]


@hypothesis.given(PAYLOADS)
def test_events_parsed_together_are_those_parsed_one_by_one(payloads: list[bytes]) -> None:
    together, apart = (Given(events, payloads).for_inputs(INPUTS) for events in ("json", json.loads))
    (one, bad), (other, as_bad) = (read(reader, Span("all", "0", "9", 9)) for reader in (together, apart))
    assert bad == as_bad
    for (name, leaf), (_, expected) in zip(named_parts(one), named_parts(other), strict=True):
        assert (leaf.dtype, listed(leaf)) == (expected.dtype, listed(expected)), name


def test_a_micro_batch_of_bad_events_alone_says_what_the_stream_holds(redis_url: str, client: redis.Redis) -> None:
    send(client, event(), *[b"<xml/>"] * 1_001)
    reader = reader_of(redis_url).for_inputs(INPUTS)
    with pytest.raises(BadInput, match="1001 events of one micro-batch cannot be read, such as clicks"):
        reader.read(whole(reader, 2_000))


def arrow(compression: str | None = None, **columns: object) -> bytes:
    table = pa.table({name: pa.array(values) for name, values in columns.items()})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        stream.write_table(table)
    return sink.getvalue()


def test_events_as_arrow_and_by_a_function(redis_url: str, client: redis.Redis) -> None:
    send(client, arrow(user=[7], clicked=[1]), arrow(user=[1, 2], clicked=[0, 0]), b"no arrow")
    batch, bad = read(reader_of(redis_url, events="arrow"))
    assert (batch[0]["user"].tolist(), len(bad)) == ([7], 2)
    client.delete("clicks")
    send(client, b"7,1", b"8,0", b"8")
    by_comma = reader_of(
        redis_url, events=lambda text: dict(zip(("user", "clicked"), map(int, text.split(b",")), strict=True))
    )
    batch, bad = read(by_comma)
    assert (batch[0]["user"].tolist(), batch[1].tolist(), len(bad)) == ([7, 8], [1.0, 0.0], 1)


def pointing(end: int) -> bytes:
    """An event whose list says that it ends elsewhere: read so, it ends the process, or trains on what lies there."""
    head, offsets, tail = arrow(user=[7], words=[["a"] * 77], clicked=[1]).rpartition(struct.pack("<ii", 0, 77))
    assert offsets, "the list's, which lie in the body, behind those of the metadata"
    return head + struct.pack("<ii", 0, end) + tail


def bomb(shared: bool) -> bytes:
    """A thousand bytes that may be gigabytes."""
    words = pa.array(["a" * (64 << 20)])
    return arrow("zstd", user=[7], words=words.dictionary_encode() if shared else words, clicked=[1])


@pytest.mark.parametrize(
    ("bad", "reason"), [(pointing(1 << 28), ""), (pointing(79), ""), (pointing(-1), ""), (bomb(False), "compressed"),
                        (bomb(True), "compressed")],
    ids=["far", "near", "before", "values", "dictionary"],
)  # fmt: skip
def test_arrow_that_lies_of_its_size_is_passed_over_before_it_is_unpacked(
    redis_url: str, client: redis.Redis, bad: bytes, reason: str
) -> None:
    words = "a" if reason else ["a"]
    send(client, arrow(user=[7], words=[words], clicked=[1]), bad)
    before = pa.default_memory_pool().max_memory()
    batch, passed_over = read(reader_of(redis_url, events="arrow"))
    assert (batch[0]["user"].tolist(), len(passed_over)) == ([7], 1)
    assert reason in passed_over[0].reason
    assert pa.default_memory_pool().max_memory() == before


def test_events_as_tensorflow_examples(redis_url: str, client: redis.Redis) -> None:
    def example(**features: Iterable[object]) -> bytes:
        made = tf.train.Example()
        for name, values in features.items():
            kinds = {int: "int64_list", float: "float_list", bytes: "bytes_list"}
            getattr(made.features.feature[name], kinds[type(next(iter(values)))]).value.extend(values)
        return bytes(made.SerializeToString())

    send(client, example(user=[7], price=[0.5], words=[b"a", b"b"], clicked=[1]))
    send(client, example(user=[-(2**63)], price=[1], words=["ä".encode()], clicked=[0]))
    bad = [example(user=[1, 2], price=[1.0], words=[b"a"], clicked=[0]), example(user=[1]), b"\xff", example()]
    bad.append(example(user=[1], price=[1.0], words=[b"\xff"], clicked=[0]))
    send(client, *bad)
    reader = reader_of(redis_url, events="example").for_inputs(INPUTS)
    (x, y), passed_over = read(reader)
    assert (x["user"].tolist(), x["price"].tolist(), y.tolist()) == ([7, -(2**63)], [0.5, 1.0], [1.0, 0.0])
    assert listed(x["words"]) == [["a", "b"], ["ä"]]
    assert len(passed_over) == len(bad)
    vectors = reader.for_inputs(ModelInputs({"user": "int64"}, {"user": 1}, own_step=False))
    batch, _ = read(vectors, *whole(vectors, 1))
    assert batch[0]["user"].shape == (1, 1)


def test_what_was_trimmed_before_it_was_trained_is_missed(redis_url: str, client: redis.Redis) -> None:
    send(client, *(event(user) for user in range(6)))
    reader = reader_of(redis_url)
    found = reader.ahead({}, 9, None)["clicks"]
    client.xtrim("clicks", maxlen=3, approximate=False)
    with pytest.raises(BadInput, match=r"1 entries of .* were trimmed or deleted before they were trained"):
        reader.ahead({"clicks": found.stops[1]}, 9, None)
    assert len(reader.ahead({"clicks": found.stops[2]}, 9, None)["clicks"].stops) == 3
    with pytest.raises(BadInput, match="2 of the 4 entries"):
        reader.events(Span("clicks", found.stops[0], found.stops[4], 4))
    fresh = reader.ahead({}, 9, None)["clicks"]
    assert (fresh.start, fresh.lag) == ("0-0/3", 3)


def test_what_was_deleted_before_it_was_trained_is_missed(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        ids = send(client, *(event(user) for user in range(9)))
        reader = reader_of(url)
        stops = reader.ahead({}, 9, None)["clicks"].stops
        client.xdel("clicks", ids[1])  # it is trained
        assert len(reader.ahead({"clicks": stops[3]}, 9, None)["clicks"].stops) == 5
        client.xdel("clicks", ids[5], ids[6])
        with pytest.raises(BadInput, match=f"2 entries of 'clicks' behind {ids[3]} were trimmed or deleted"):
            reader.ahead({"clicks": stops[3]}, 9, None)
        for most, until in ((1, None), (9, {"clicks": ids[-1]})):
            with pytest.raises(BadInput, match="some entries of 'clicks'"):
                reader.ahead({"clicks": stops[3]}, most, until)
        assert reader.ahead({"clicks": stops[6]}, 9, None)["clicks"].lag == 2
        fresh = reader.ahead({}, 2, None)["clicks"]  # a job that begins now
        rest = reader.ahead({"clicks": fresh.stops[-1]}, 9, None)["clicks"]
        assert (fresh.start, len(rest.stops), rest.lag) == (f"0-0/3/{ids[6]}", 4, 4)
        client.xdel("clicks", ids[4])
        with pytest.raises(BadInput, match="1 entries of 'clicks'"):
            reader.ahead({"clicks": fresh.stops[-1]}, 9, None)
        client.xtrim("clicks", maxlen=0, approximate=False)
        empty = reader.ahead({}, 9, None)["clicks"]
        send(client, event())
        assert len(reader.ahead({"clicks": empty.start}, 9, None)["clicks"].stops) == 1


def test_what_is_trimmed_while_it_is_listed_is_missed(
    redis_url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_stream_reader, "_AT_ONCE", 2)

    class Trimmed(et.RedisStreamReader):
        def _call(self, *asked: Keyword) -> list[object]:
            found: list[object] = super()._call(*asked)
            client.xtrim("clicks", maxlen=3, approximate=False)
            return found

    send(client, *(event(user) for user in range(9)))
    whole = reader_of(redis_url).ahead({}, 9, None)["clicks"].stops
    assert [each.partition("/")[2] for each in whole] == [str(number) for number in range(1, 10)]
    with pytest.raises(BadInput, match="4 entries of 'clicks' behind"):
        Trimmed(redis_url, "clicks").ahead({"clicks": whole[1]}, 4, None)


def test_a_listing_leaves_the_fields_at_the_server(redis_url: str, client: redis.Redis) -> None:
    send(client, *[event(words=["x" * 1_000])] * 2_000)
    reader = reader_of(redis_url)
    sent = client.info()["total_net_output_bytes"]
    assert len(reader.ahead({}, 2_000, None)["clicks"].stops) == 2_000
    assert client.info()["total_net_output_bytes"] - sent < 100_000


def test_the_event_is_one_field_of_several(redis_url: str, client: redis.Redis) -> None:
    for number in range(3):
        client.xadd("clicks", {"sender": "{}", "event": json.dumps(event(number)), "at": "1"})
    batch, bad = read(reader_of(redis_url).for_inputs(INPUTS))
    assert (batch[0]["user"].tolist(), bad) == ([0, 1, 2], ())


def test_a_user_who_may_only_read_and_run_scripts_that_do(redis_url: str, client: redis.Redis) -> None:
    send(client, event())
    rights = ("~clicks", "+@read", "+ping", "+info", "+eval_ro")
    client.execute_command("ACL", "SETUSER", "trainer", "on", ">secret", *rights)
    try:
        reader = reader_of(redis_url.replace("://", "://trainer:secret@"))
        assert len(reader.events(whole(reader)[0])) == len(reader.ends()) == 1
    finally:
        client.execute_command("ACL", "DELUSER", "trainer")


@pytest.mark.parametrize("reply", [[b"1-1"], [[b"1-1", b"x"]], [[1, [b"event", b"{}"]]], [[b"1-1", [], []]]])
def test_what_is_no_entry_of_a_stream_is_refused(reply: list[object]) -> None:
    with pytest.raises(StoreFailed, match="answered XRANGE with"):
        require_shapes([("XRANGE", "clicks", "-", "+")], [reply], "here")


def test_a_stream_that_is_gone_or_another_one_is_refused(redis_url: str, client: redis.Redis) -> None:
    ids = send(client, *(event(user) for user in range(9)))
    reader = reader_of(redis_url)
    position = {"clicks": reader.ahead({}, 4, None)["clicks"].stops[-1]}
    client.delete("clicks")
    for until in (None, {"clicks": ids[-1]}):
        with pytest.raises(BadInput, match=f"'clicks', planned up to {ids[3]}, is not at .* any more"):
            reader.ahead(position, 9, until)
    for count in (2, 9):
        send(client, *[event()] * count)
        with pytest.raises(BadInput, match=f"'clicks' at .* is another stream than the one planned up to {ids[3]}"):
            reader.ahead(position, 2, None)


def test_a_stream_that_is_empty_is_refused_and_a_dead_server_is_away(redis_url: str, client: redis.Redis) -> None:
    with pytest.raises(BadInput, match="no event is there yet"):
        reader_of(redis_url).take(np.array([0]))
    send(client, b"<xml/>")
    with pytest.raises(BadInput, match="none of its first events can be read as said by events="):
        reader_of(redis_url).take(np.array([0]))
    client.delete("clicks")
    (at,) = send(client, {"user": 1})
    with pytest.raises(BadInput, match=f"the first event, clicks {at}.*: no column 'clicked'; its columns are 'user'"):
        reader_of(redis_url).take(np.array([0]))
    client.delete("clicks")
    (at, _) = send(client, event(user="me"), event())
    message = f"the first event, clicks {at}.*: column 'user' is string, and the model takes int64 .*; take it out"
    with pytest.raises(BadInput, match=message):
        reader_of(redis_url).for_inputs(INPUTS).take(np.array([0]))
    client.xdel("clicks", at.partition("/")[0])
    assert reader_of(redis_url).for_inputs(INPUTS).take(np.array([0]))[0]["user"].tolist() == [7]
    with pytest.raises(Unavailable):
        reader_of("redis://127.0.0.1:1?deadline=0.2").ahead({}, 1, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps_per_epoch": 0}, "steps_per_epoch=0"),
        ({"events": "xml"}, "events='xml': write 'json', 'arrow', 'example'"),
        ({"key": []}, "give the key of a stream"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        reader_of("redis://127.0.0.1", **options)  # type: ignore[arg-type]
