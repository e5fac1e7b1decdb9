"""Events in Kafka, at librdkafka's mock brokers: offsets, topics that come, bad events, brokers that are away."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace

import confluent_kafka
import numpy as np
import pytest
from confluent_kafka import (
    OFFSET_END,
    OFFSET_INVALID,
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    IsolationLevel,
    KafkaError,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

import elastable as et
from elastable.embedding_store.errors import BadInput, Unavailable
from elastable.master.api import Span
from elastable.worker.readers.streams import kafka_reader
from tests.contracts.streams import read
from tests.untyped import Keyword
from tests.waiting import until_stopped

BROKER = """
from confluent_kafka import Producer
producer = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0})
(broker,) = producer.list_topics(timeout=30).brokers.values()
producer.produce("clicks", b"{}", partition=0)
producer.flush(30)
print(f"{broker.host}:{broker.port}", flush=True)
input()
"""


class Broker:
    """A mock broker, in this process."""

    def __init__(self) -> None:
        settings = {"bootstrap.servers": "mock", "test.mock.num.brokers": 1, "log_level": 0}
        self._producer = Producer(settings)
        (broker,) = self._producer.list_topics(timeout=30).brokers.values()
        self.servers = f"{broker.host}:{broker.port}"

    def send(self, topic: str, *events: object, partition: int = 0) -> None:
        for event in events:
            self._producer.produce(topic, event if isinstance(event, bytes) else json.dumps(event), partition=partition)
        assert self._producer.flush(30) == 0

    def close(self) -> None:
        del self._producer


@contextmanager
def running_broker() -> Iterator[Broker]:
    broker = Broker()
    try:
        yield broker
    finally:
        broker.close()


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running_broker() as broker:
        yield broker


def reader_of(broker: Broker, *topics: str, **options: Keyword) -> et.KafkaReader:
    return et.KafkaReader(topics, broker.servers, label="clicked", config={"log_level": 0}, **options)


def event(user: int) -> dict[str, int]:
    return {"user": user, "clicked": user % 2}


def test_offsets_are_positions_and_spans_come_back_the_same(broker: Broker) -> None:
    broker.send("spans", *map(event, range(9)))
    broker.send("spans", *map(event, range(9, 12)), partition=1)
    reader = reader_of(broker, "spans")
    found = reader.ahead({}, 4, None)
    assert (found["spans/0"].stops, found["spans/0"].more, found["spans/0"].lag) == (["1", "2", "3", "4"], True, 9)
    assert (found["spans/1"].stops, found["spans/1"].more, found["spans/1"].lag) == (["1", "2", "3"], False, 3)
    for _ in range(2):
        spans = [Span("spans/0", "2", "5", 3), Span("spans/1", "1", "2", 1), Span("spans/0", "5", "7", 2)]
        batch, bad = read(reader, *spans)
        assert (batch[0]["user"].tolist(), bad) == ([2, 3, 4, 10, 5, 6], ())
    later = reader.ahead({"spans/0": "9", "spans/1": "2"}, 4, None)
    assert [later[f"spans/{number}"].lag for number in (0, 1)] == [0, 1]
    assert later["spans/1"].since == pytest.approx(time.time(), abs=600)


def test_partitions_are_read_ahead_and_paused_where_that_is_much(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_reader, "_AHEAD", 3)
    for number in range(3):
        broker.send("beside", *map(event, range(100 * number, 100 * number + 400)), partition=number)
    reader = reader_of(broker, "beside")
    for _ in range(3):  # from the beginning again, where each is paused, or not
        for first in range(0, 400, 40):
            spans = [Span(f"beside/{number}", str(first), str(first + 40), 40) for number in (2, 0, 1)]
            batch, bad = read(reader, *spans)
            expected = [100 * number + first + at for number in (2, 0, 1) for at in range(40)]
            assert (batch[0]["user"].tolist(), bad) == (expected, ())


def test_an_end_is_one_of_now_of_a_time_or_of_positions(broker: Broker) -> None:
    broker.send("ends", *map(event, range(3)))
    reader = reader_of(broker, "ends")
    ends = reader.ends()
    assert (ends["ends/0"], ends["ends/1"]) == ("3", "0")
    assert reader.identity().startswith("Kafka cluster mockCluster")
    broker.send("ends", event(3))
    assert len(reader.ahead({}, 9, ends)["ends/0"].stops) == 3
    assert len(reader.ahead({}, 9, {"ends/0": "2"})["ends/0"].stops) == 2
    assert reader.ends(time.time() + 3600)["ends/0"] == "4"
    with pytest.raises(BadInput, match="there is no partition 'ends/99'"):
        reader.ahead({}, 9, {"ends/99": "2"})
    with pytest.raises(BadInput, match="position 'x': write an offset"):
        reader.ahead({"ends/0": "x"}, 9, None)


def test_a_topic_that_comes_later_is_read_from_its_beginning(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_reader, "_TOPICS_EVERY_S", -1.0)
    broker.send("first", event(1))
    reader = reader_of(broker, "first", "second")
    assert [each.lag for each in reader.ahead({}, 9, None).values() if each.lag] == [1]
    broker.send("second", event(2), event(3))
    assert len(reader.ahead({"first/0": "1"}, 9, None)["second/0"].stops) == 2


def test_committed_offsets_follow_for_tools(broker: Broker) -> None:
    broker.send("watched", *map(event, range(5)))
    reader = reader_of(broker, "watched", group="clicks job")
    reader.committed({"watched/0": "4"})
    place, give_up = TopicPartition("watched", 0), time.monotonic() + 60
    tool = Consumer({"bootstrap.servers": broker.servers, "group.id": "clicks job", "log_level": 0})
    while tool.committed([place], timeout=30)[0].offset != 4:
        assert time.monotonic() < give_up
    tool.close()


def test_bad_events_are_passed_over(broker: Broker) -> None:
    broker.send("bad", event(0), b"{", event(2))
    batch, bad = read(reader_of(broker, "bad"), Span("bad/0", "0", "3", 3))
    assert batch[0]["user"].tolist() == [0, 2]
    assert [(each.partition, each.position) for each in bad] == [("bad/0", "1")]


def test_a_broker_that_is_gone_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_broker() as broker:
        broker.send("clicks", event(0), event(1))
        reader = reader_of(broker, "clicks")
        reader.take(np.array([0]))
    monkeypatch.setattr(kafka_reader, "_CALL_S", 0.5)
    with pytest.raises(Unavailable, match=r"et\.KafkaReader"):
        reader.ends()
    with pytest.raises(Unavailable, match=r"et\.KafkaReader"):
        reader.events(Span("clicks/1", "0", "1", 1))


def test_a_broker_that_hangs_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", BROKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            reader = et.KafkaReader("clicks", process.stdout.readline().decode().strip(), config={"log_level": 0})
            assert reader.ahead({}, 9, None)["clicks/0"].lag == 1
            monkeypatch.setattr(kafka_reader, "_CALL_S", 0.5)
            monkeypatch.setattr(kafka_reader, "_TOPICS_EVERY_S", 1e9)
            process.send_signal(signal.SIGSTOP)
            until_stopped(process)
            for _ in range(3):
                with pytest.raises(Unavailable, match=r"et\.KafkaReader"):
                    reader.ahead({}, 9, None)
        finally:
            process.kill()


def test_a_position_behind_the_end_is_refused(broker: Broker) -> None:
    broker.send("made anew", event(0))
    with pytest.raises(BadInput, match="made anew/0 ends at offset 1, and is planned up to 5: it was truncated"):
        reader_of(broker, "made anew").ahead({"made anew/0": "5"}, 9, None)
    with pytest.raises(Unavailable, match="made anew/77, planned up to 5, is not there"):
        reader_of(broker, "made anew").ahead({"made anew/77": "5"}, 9, None)


def test_a_topic_whose_partitions_cannot_be_told_is_not_taken_for_one_without(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Erring(Consumer):
        error = KafkaError(KafkaError.LEADER_NOT_AVAILABLE)

        def list_topics(self, topic: str, timeout: float) -> object:
            found = super().list_topics(topic, timeout=timeout)
            found.topics[topic].error, found.topics[topic].partitions = self.error, {}
            return found

    monkeypatch.setattr(confluent_kafka, "Consumer", Erring)
    broker.send("told", event(0))
    with pytest.raises(Unavailable, match="LEADER_NOT_AVAILABLE"):
        reader_of(broker, "told").ends()
    Erring.error = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(BadInput, match="TOPIC_AUTHORIZATION_FAILED"):
        reader_of(broker, "told").ends()


def test_the_end_is_that_of_committed_transactions(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mock broker knows no transactions: what is asked is looked at."""
    asked: list[object] = []

    listed = AdminClient.list_offsets

    def asking(client: AdminClient, places: object, **options: Keyword) -> object:
        asked.append(options.get("isolation_level"))
        return listed(client, places, **options)

    monkeypatch.setattr(AdminClient, "list_offsets", asking)
    broker.send("transactions", event(0))
    reader_of(broker, "transactions").ends()
    assert asked == [IsolationLevel.READ_COMMITTED]


def test_what_no_broker_has_told_is_waited_for(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """To librdkafka that is no error: places come back as they were sent or with OFFSET_INVALID, None for a name."""

    class Silent(Consumer):
        told: int | None = None

        def offsets_for_times(self, places: list[TopicPartition], *_: float) -> list[TopicPartition]:
            if self.told is not None:
                places = [TopicPartition(each.topic, each.partition, self.told) for each in places]
            return places

        def list_topics(self, *asked: Keyword, **options: Keyword) -> object:
            return SimpleNamespace(cluster_id=None, topics=super().list_topics(*asked, **options).topics)

    listed = AdminClient.list_offsets

    def untold(client: AdminClient, places: object, **options: Keyword) -> object:
        told = {place: Future[object]() for place in listed(client, places, **options)}
        for future in told.values():
            future.set_result(SimpleNamespace(offset=OFFSET_INVALID))
        return told

    broker.send("silent", event(0))
    assert reader_of(broker, "silent").identity() != "Kafka cluster None"
    monkeypatch.setattr(confluent_kafka, "Consumer", Silent)
    reader = reader_of(broker, "silent")
    with pytest.raises(Unavailable, match="no broker has said which cluster it is of"):
        reader.identity()
    for told in (None, OFFSET_INVALID):
        monkeypatch.setattr(Silent, "told", told)
        with pytest.raises(Unavailable, match="silent/0 has not said its offsets of a time"):
            reader.ends(time.time())
    monkeypatch.setattr(Silent, "told", OFFSET_END)
    assert reader.ends(time.time())["silent/0"] == "1"
    monkeypatch.setattr(AdminClient, "list_offsets", untold)
    for asked in (reader.ends, lambda: reader.ahead({}, 9, None)):
        with pytest.raises(Unavailable, match="silent/0 has not said its offsets"):
            asked()


def test_a_message_without_a_time_has_no_age(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.send("timeless", event(0))
    reader = reader_of(broker, "timeless")
    untimed = SimpleNamespace(timestamp=lambda: (TIMESTAMP_NOT_AVAILABLE, -1))
    monkeypatch.setattr(reader._log, "read", lambda *_: [untimed])
    found = reader.ahead({"timeless/0": "0"}, 9, None)["timeless/0"]
    assert (found.lag, found.since) == (1, None)


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(BadInput, match="give a topic"):
        et.KafkaReader([], "127.0.0.1:1")
