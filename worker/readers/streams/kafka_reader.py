"""Events in topics of Kafka."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastable.embedding_store.errors import BadInput, Unavailable
from elastable.embedding_store.support.extras import needs
from elastable.master.api import Span, Waiting
from elastable.worker.readers.streams.event_reader import Decode, PayloadReader

if TYPE_CHECKING:
    from confluent_kafka import Message, TopicPartition

_log = logging.getLogger(__name__)

_CALL_S = 10.0
_TOPICS_EVERY_S = 1.0
_AGES_EVERY_S = 5.0
_MOST_AGES = 16  # partitions whose first waiting event is read for its time
_AT_ONCE = 10_000  # messages of one call
_AHEAD, _AHEAD_BYTES = 65_536, 64 << 20  # messages, and their bytes, that may come ahead
_RETRIED = (
    "_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT", "_TIMED_OUT_QUEUE", "_RESOLVE", "_WAIT_COORD", "_NOENT",
    "LEADER_NOT_AVAILABLE",
)  # fmt: skip


class KafkaReader(PayloadReader):
    """Events in topics of Kafka, read by librdkafka: the values of messages, of committed transactions alone.

    A partition is called `topic/number`; topics and partitions that come later are read from their beginning. Positions
    are offsets, of the event after; no consumer group decides anything. The group's committed offsets follow the job,
    for tools that watch it. Offsets without a message (of a compacted topic, or of transactions) make micro-batches
    smaller. An event that has gone before it was trained ends the job.

    Args:
        topic: A topic, or several.
        servers: `host:port`, or several with commas: some of the brokers.
        steps_per_epoch: Versions in an epoch.
        events: "json", "arrow", "example" or a function, as of `PayloadReader`.
        columns: `features`, `label`, `weight`, `column_types`, `fill_null`, `fill_null_list`, as of `PayloadReader`.
        group: Whose committed offsets follow.
        config: Further settings of librdkafka, such as those of TLS and SASL.

    Raises:
        BadInput: options that cannot be.
        NotInstalled: `elastable[kafka]` is not.
    """

    def __init__(
        self,
        topic: str | Sequence[str],
        servers: str,
        steps_per_epoch: int = 1_000,
        *,
        events: str | Decode = "json",
        group: str = "elastable",
        config: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> None:
        topics = [topic] if isinstance(topic, str) else list(topic)
        name = f"et.KafkaReader({', '.join(map(repr, topics))})"
        super().__init__(name, steps_per_epoch, events, **columns)
        if not topics or not all(isinstance(each, str) and each for each in topics):
            raise BadInput(f"{name}: give a topic, or a list of them")
        with needs("et.KafkaReader", "kafka"):
            import confluent_kafka  # noqa: F401
        settings = {
            "bootstrap.servers": servers, "group.id": group, "enable.auto.commit": False,
            "auto.offset.reset": "error", "enable.partition.eof": True, "fetch.wait.max.ms": 50,
            **(config or {}),
        }  # fmt: skip
        # What is asked, every few milliseconds, does not wait for what is read, nor disturb it.
        self._log, self._read = _Topics(name, topics, settings), _Topics(name, topics, settings)

    def ahead(self, positions: Mapping[str, str], most: int, until: Mapping[str, str] | None) -> Mapping[str, Waiting]:
        log, found = self._log, {}
        names = log.partitions()
        if until is not None and (unknown := [each for each in until if each not in names]):
            raise BadInput(f"{self._name}: there is no partition {unknown[0]!r} to end in: they are {names}")
        if gone := [each for each in positions if each not in names and log.has_topic_of(each)]:
            raise Unavailable(
                f"{self._name}: {gone[0]}, planned up to {positions[gone[0]]}, is not there: no such topic"
            )
        names = names if until is None else list(until)
        planned = {name: _offset(positions[name], self._name) for name in names if name in positions}
        lasts = {name: _offset(position, self._name) for name, position in (until or {}).items()}
        reach = {name: min(start + most, lasts.get(name, start + most)) for name, start in planned.items()}
        firsts, ends = log.bounds(names, reach)
        starts = {name: planned.get(name, firsts[name]) for name in names}
        ages = log.ages({name: starts[name] for name in names if starts[name] < ends[name]}) if positions else {}
        for name in names:
            start, end = starts[name], ends[name]
            if start < firsts[name]:
                raise BadInput(
                    f"{self._name}: {firsts[name] - start} events of {name} from offset {start} on were deleted before "
                    "they were trained; keep them for longer (retention.ms), or begin a new job"
                )
            if start > end:
                raise BadInput(
                    f"{self._name}: {name} ends at offset {end}, and is planned up to {start}: it was truncated, or is "
                    "another topic of that name; begin a new job"
                )
            last = min(end, lasts.get(name, end))
            stops = [str(offset) for offset in range(start + 1, min(last, start + most) + 1)]
            found[name] = Waiting(str(start), stops, start + most < last, max(0, end - start), ages.get(name))
        return found

    def ends(self, before: float | None = None) -> Mapping[str, str]:
        names = self._log.partitions()
        found = self._log.offsets(names, last=True) if before is None else self._log.before(names, before)
        return {name: str(offset) for name, offset in found.items()}

    def identity(self) -> str:
        """The id of the Kafka cluster."""
        return self._log.cluster()

    def committed(self, positions: Mapping[str, str]) -> None:
        self._log.commit({name: _offset(position, self._name) for name, position in positions.items()})

    def events(self, span: Span) -> list[Message]:
        return self._read.read(span.partition, _offset(span.start, self._name), _offset(span.stop, self._name))

    def position(self, event: Message) -> str:
        return str(event.offset())

    def payload(self, event: Message) -> bytes:
        return event.value() or b""


def _offset(position: str, name: str) -> int:
    if not position.isdecimal() or len(position) > 19:
        raise BadInput(f"{name}: position {position[:60]!r}: write an offset, such as 4711")
    return int(position)


class _Topics:
    """The topics at the brokers: one connection, for one thread at a time."""

    def __init__(self, name: str, topics: Sequence[str], settings: Mapping[str, Any]) -> None:
        self._name, self._topics, self._settings = name, topics, dict(settings)
        self._lock = threading.RLock()
        self._made: Any = None
        self._asked: Any = None
        self._known: list[str] = []
        self._looked = self._aged = self._bounded = -_AGES_EVERY_S
        self._bounds: tuple[dict[str, int], dict[str, int]] = {}, {}
        self._ages: dict[str, float] = {}
        self._read: dict[str, _Partition] = {}  # what the consumer reads, all of it ahead

    @contextmanager
    def _calling(self) -> Iterator[Any]:
        """The consumer, for one call; errors of Kafka are ours."""
        import confluent_kafka as kafka

        with self._lock:
            try:
                if self._made is None:
                    self._made = kafka.Consumer(self._settings, logger=_log)
                yield self._made
            except kafka.KafkaException as error:
                raise self._error(error.args[0]) from error
            except TimeoutError as error:
                raise Unavailable(f"{self._name}: no broker has answered for {_CALL_S} s") from error

    def _error(self, error: Any) -> Exception:
        passes = error.retriable() or error.name() in _RETRIED
        return (Unavailable if passes else BadInput)(f"{self._name}: {error.name()}: {error.str()}")

    def _place(self, partition: str, offset: int) -> TopicPartition:
        from confluent_kafka import TopicPartition

        topic, _, number = partition.rpartition("/")
        return TopicPartition(topic, int(number), offset)

    def has_topic_of(self, partition: str) -> bool:
        return partition.rpartition("/")[0] in self._topics

    def partitions(self) -> list[str]:
        """Names of all partitions, as of a second ago."""
        if time.monotonic() - self._looked > _TOPICS_EVERY_S:
            with self._calling() as consumer:
                known = []
                for topic in self._topics:
                    found = consumer.list_topics(topic, timeout=_CALL_S).topics[topic]
                    if found.error is not None and found.error.name() != "UNKNOWN_TOPIC_OR_PART":  # that may come
                        raise self._error(found.error)
                    known += [f"{topic}/{number}" for number in sorted(found.partitions)]
                self._known, self._looked = known, time.monotonic()
        return list(self._known)

    def bounds(self, names: Sequence[str], reach: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        """Of each partition the first offset that is there, and the one after the last.

        As of a second ago, where each of them reached then as far as is said.
        """
        firsts, ends = self._bounds
        known = names == list(ends) and all(name in reach and ends[name] >= reach[name] for name in names)
        if not known or time.monotonic() - self._bounded > _TOPICS_EVERY_S:
            self._bounds = firsts, ends = self.offsets(names, last=False), self.offsets(names, last=True)
            self._bounded = time.monotonic()
        return firsts, ends

    def cluster(self) -> str:
        with self._calling() as consumer:
            cluster = consumer.list_topics(self._topics[0], timeout=_CALL_S).cluster_id
        if cluster is None:
            raise Unavailable(f"{self._name}: no broker has said which cluster it is of")
        return f"Kafka cluster {cluster}"

    def offsets(self, names: Sequence[str], last: bool) -> dict[str, int]:
        """Of each partition the first offset that is there, or the one after the last."""
        from confluent_kafka import IsolationLevel
        from confluent_kafka.admin import AdminClient, OffsetSpec

        with self._calling():
            if self._asked is None:
                ours = ("group.id", "enable.auto.commit", "auto.offset.reset", "enable.partition.eof")
                settings = {name: value for name, value in self._settings.items() if name not in ours}
                self._asked = AdminClient({**settings, "fetch.wait.max.ms": 50}, logger=_log)
            spec = OffsetSpec.latest() if last else OffsetSpec.earliest()
            places = {self._place(name, 0): name for name in names}
            level = IsolationLevel.READ_COMMITTED  # as messages are read: those of an open transaction do not come
            asked = (
                self._asked.list_offsets(dict.fromkeys(places, spec), isolation_level=level, request_timeout=_CALL_S)
                if names
                else {}
            )
            found = {places[place]: int(future.result(_CALL_S).offset) for place, future in asked.items()}
        if unanswered := [name for name, offset in found.items() if offset < 0]:  # to librdkafka that is no error
            raise Unavailable(f"{self._name}: the broker of {unanswered[0]} has not said its offsets")
        return found

    def before(self, names: Sequence[str], moment: float) -> dict[str, int]:
        """The offset after the last message that came before a Unix time."""
        from confluent_kafka import OFFSET_END

        ends, asked = self.offsets(names, last=True), int(moment * 1000)
        with self._calling() as consumer:
            found = consumer.offsets_for_times([self._place(name, asked) for name in names], _CALL_S)
        if failed := [place for place in found if place.error is not None]:
            raise self._error(failed[0].error)
        offsets = {name: place.offset for name, place in zip(names, found, strict=True)}
        # What was not answered is an error neither, and is as it was asked.
        if untold := [name for name, at in offsets.items() if at == asked or (at < 0 and at != OFFSET_END)]:
            raise Unavailable(f"{self._name}: the broker of {untold[0]} has not said its offsets of a time")
        return {name: ends[name] if at == OFFSET_END else at for name, at in offsets.items()}

    def ages(self, starts: Mapping[str, int]) -> dict[str, float]:
        """Unix time of the message at an offset, of some partitions, as of a few seconds ago."""
        from confluent_kafka import TIMESTAMP_NOT_AVAILABLE

        with self._lock:
            if time.monotonic() - self._aged > _AGES_EVERY_S:
                self._ages = {}
                for name, start in list(starts.items())[:_MOST_AGES]:
                    for kind, moment in (message.timestamp() for message in self.read(name, start, start + 1)):
                        if kind != TIMESTAMP_NOT_AVAILABLE:
                            self._ages[name] = moment / 1000
                self._aged = time.monotonic()
                with self._calling() as consumer:  # else more and more comes ahead
                    self._read.clear()
                    consumer.unassign()
            return self._ages

    def commit(self, offsets: Mapping[str, int]) -> None:
        """Tells the group's coordinator; whether it hears of it decides nothing."""
        with self._calling() as consumer:
            if offsets:
                consumer.commit(offsets=[self._place(*each) for each in offsets.items()], asynchronous=True)

    def read(self, partition: str, start: int, stop: int) -> list[Message]:
        """The messages at offsets from `start` to `stop - 1`. Raises `Unavailable` where they do not come."""
        with self._calling() as consumer:
            try:
                its = self._at(consumer, partition, start)
                its.start, found, give_up = stop, list[Any](), time.monotonic() + _CALL_S
                while True:
                    while its.messages and its.messages[0].offset() < stop:
                        found.append(its.messages.popleft())
                        its.bytes -= len(found[-1])
                    if its.paused and not self._is_much(its, 0.5):  # it takes a while until the next ones come
                        consumer.resume([self._place(partition, 0)])
                        its.paused = False
                    if its.messages or its.place >= stop:
                        return found
                    if self._take(consumer, its, stop - its.place):
                        give_up = time.monotonic() + _CALL_S
                    elif time.monotonic() > give_up:
                        raise Unavailable(
                            f"{self._name}: {partition} has sent nothing at offset {its.place} for {_CALL_S} s"
                        )
            except BaseException:
                self._read.clear()
                consumer.unassign()
                raise

    def _at(self, consumer: Any, partition: str, start: int) -> _Partition:
        """A partition that is read from there on, as it is already where its reads follow each other."""
        its = self._read.get(partition)
        if its is None or its.start != start:
            place = self._place(partition, start)
            if its is None:
                consumer.incremental_assign([place])
            else:  # others read in between: what came ahead of any partition would be for nobody
                self._read = {}
                consumer.assign([place])
            consumer.resume([place])  # it may come back paused
            its = self._read[partition] = _Partition(start, start)
        return its

    def _take(self, consumer: Any, wanted: _Partition, most: int) -> bool:
        """Takes what has come of any partition; False: nothing has."""
        from confluent_kafka import KafkaError

        messages = consumer.consume(min(_AT_ONCE, most), timeout=0.1)
        known = {(name.rpartition("/")[0], int(name.rpartition("/")[2])): its for name, its in self._read.items()}
        for message in messages:
            its = known.get((message.topic(), message.partition()))
            if message.error() is None:
                if its is not None and message.offset() >= its.place:
                    its.messages.append(message)
                    its.bytes += len(message)
                    its.place = message.offset() + 1
            elif message.error().code() != KafkaError._PARTITION_EOF:
                raise self._error(message.error())
            elif its is not None:
                its.place = max(its.place, message.offset())
        for name, its in self._read.items():
            if not its.paused and its is not wanted and self._is_much(its):
                consumer.pause([self._place(name, 0)])
                its.paused = True
        return bool(messages)

    def _is_much(self, its: _Partition, share: float = 1.0) -> bool:
        """Whether more of a partition has come ahead than this share of what may."""
        of_each = share / len(self._read)
        return len(its.messages) > _AHEAD * of_each or its.bytes > _AHEAD_BYTES * of_each


@dataclass
class _Partition:
    """A partition that is read: where its next read begins, the offset that it has come to, and what came ahead.

    It is paused while that is much, and what came of it is not read yet.
    """

    start: int
    place: int
    messages: deque[Any] = field(default_factory=deque)
    bytes: int = 0
    paused: bool = False
