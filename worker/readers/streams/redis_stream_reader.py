"""Events in Redis Streams."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from elastable.embedding_store.errors import BadInput, StoreFailed
from elastable.embedding_store.tiers.redis.connection import Deadline
from elastable.embedding_store.tiers.redis.reply_shapes import Command, Reply
from elastable.embedding_store.tiers.redis.topology import Topology
from elastable.embedding_store.tiers.redis.url import RedisUrl
from elastable.master.api import Span, Waiting
from elastable.worker.readers.streams.event_reader import Decode, PayloadReader

_POSITION = re.compile(r"([0-9]{1,20}-[0-9]{1,20})(?:/([0-9]{1,20})(?:/([0-9]{1,20}-[0-9]{1,20}))?)?")
_LAST_SEQUENCE = 2**64 - 1
_AT_ONCE = 10_000  # entries of one answer
_FIRST_TIME = 1e9  # Unix time of 2001: before it there was no Redis
_LISTING = Path(__file__).with_name("listed_entries.lua").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _State:
    """Of a stream: how many entries were ever added, and are gone; the first entry's id, and the last one of XDEL."""

    added: int
    gone: int
    first: str
    deleted: str

    @property
    def beginning(self) -> str:
        """The position before its first entry."""
        in_midst = self.added > self.gone and _order(self.deleted) > _order(self.first)
        return f"0-0/{self.gone}/{self.deleted}" if in_midst else f"{self.deleted}/{self.gone}"


class RedisStreamReader(PayloadReader):
    """Events in Redis Streams (Redis from 7.0, or Valkey), each an entry with a field that holds it.

    A stream is a partition; no consumer group takes part. Positions are entry ids, with the number of the entry in its
    stream: `1764288000000-0/17`; where entries in its midst were deleted before the job began, also with the last of
    these. An entry that was trimmed or deleted before it was trained ends the job, and so does another stream of that
    key.

    Args:
        url: `redis://host:port`, as of a store; servers may be a Cluster, or watched by Sentinels.
        key: The key of a stream, or several; those that are not there yet may come.
        steps_per_epoch: Versions in an epoch.
        events: "json", "arrow", "example" or a function, as of `PayloadReader`.
        columns: `features`, `label`, `weight`, `column_types`, `fill_null`, `fill_null_list`, as of `PayloadReader`.
        field: The field of an entry that holds the event.

    Raises:
        BadInput: options that cannot be.
    """

    def __init__(
        self,
        url: str,
        key: str | Sequence[str],
        steps_per_epoch: int = 1_000,
        *,
        events: str | Decode = "json",
        field: str = "event",
        **columns: Any,
    ) -> None:
        self._keys = [key] if isinstance(key, str) else list(key)
        name = f"et.RedisStreamReader({', '.join(map(repr, self._keys))})"
        super().__init__(name, steps_per_epoch, events, **columns)
        if not self._keys or not all(isinstance(each, str) and each for each in self._keys):
            raise BadInput(f"{name}: give the key of a stream, or a list of them")
        self._url, self._field = RedisUrl.parse(url), field.encode()
        self._topology: Topology | None = None
        self._connecting = threading.Lock()

    def ahead(self, positions: Mapping[str, str], most: int, until: Mapping[str, str] | None) -> Mapping[str, Waiting]:
        found = {}
        for key in self._keys if until is None else until:
            if key not in self._keys:
                raise BadInput(f"{self._name}: there is no partition {key!r} to end in: they are {self._keys}")
            start = positions.get(key)
            last = "+" if until is None else _parsed(until[key], self._name)[0]
            behind = "0-0" if start is None else _parsed(start, self._name)[0]
            state, ids = self._listed(key, behind, last, most + 1)
            if start is None:
                if state is None:
                    continue
                start = state.beginning
            _, number, deleted = _parsed(start, self._name)
            whole = until is None and len(ids) <= most
            state = self._require_all(key, start, state, number + len(ids) if whole else None)
            known = f"/{deleted}" if deleted else ""
            stops = [f"{each}/{number + place}{known}" for place, each in enumerate(ids[:most], 1)]
            moment = int(ids[0].partition("-")[0]) / 1000 if ids else 0.0
            since = moment if moment > _FIRST_TIME else None  # ids that the sender made are numbers
            found[key] = Waiting(start, stops, len(ids) > most, max(len(stops), state.added - number), since)
        return found

    def _listed(self, key: str, after: str, last: str, most: int) -> tuple[_State | None, list[str]]:
        """A stream, None: there is none, and the ids of at most so many entries behind one."""
        ids: list[str] = []
        while True:
            count = min(_AT_ONCE, most - len(ids))
            reply = self._call(key, ("EVAL_RO", _LISTING, 1, key, after, last, count))
            if not reply:
                return None, ids
            said, listed = dict(zip(reply[0][::2], reply[0][1::2], strict=True)), reply[1].decode().split()
            if b"entries-added" not in said:
                raise BadInput(
                    f"{self._name}: the server at {self._url} does not count entries: it takes Redis from 7.0"
                )
            if len(listed) > count:
                raise StoreFailed(f"redis at {self._url} named {len(listed)} entries of {key!r}, of {count} asked for")
            ids += listed
            if len(listed) < count or len(ids) == most:
                added, gone = int(said[b"entries-added"]), int(said[b"entries-added"]) - int(said[b"length"])
                first, deleted = said[b"recorded-first-entry-id"], said[b"max-deleted-entry-id"]
                return _State(added, gone, first.decode(), deleted.decode()), ids
            after = ids[-1]

    def _require_all(self, key: str, start: str, state: _State | None, there: int | None) -> _State:
        """The state of a stream. Raises `BadInput` where entries behind a position are gone.

        Args:
            there: How many were added up to the last one that is there; None: that is not known.
        """
        entry, number, deleted = _parsed(start, self._name)
        if state is None:
            raise BadInput(
                f"{self._name}: the stream {key!r}, planned up to {entry}, is not at {self._url} any more: it was "
                "deleted or has expired; bring it back and resume the job, or begin a new one"
            )
        lost = max(0 if there is None else state.added - there, state.gone - number)
        if lost > 0 or _order(state.deleted) > max(_order(entry), _order(deleted or "0-0")):
            raise BadInput(
                f"{self._name}: {lost if lost > 0 else 'some'} entries of {key!r} behind {entry} were trimmed or "
                "deleted before they were trained; keep more of the stream (XADD MAXLEN, XTRIM, XDEL), or begin a new "
                "job"
            )
        trained_there = state.added > state.gone and _order(state.first) <= _order(entry)
        if state.added < number or trained_there != (state.gone < number):
            raise BadInput(
                f"{self._name}: {key!r} at {self._url} is another stream than the one planned up to {entry}, its entry "
                f"{number}: {state.added} were added to this one, from {state.first} on; bring the other back and "
                "resume the job, or begin a new one"
            )
        return state

    def ends(self, before: float | None = None) -> Mapping[str, str]:
        last = {}
        for key in self._keys:
            if before is not None:
                last[key] = f"{int(before * 1000) - 1}-{_LAST_SEQUENCE}"
            elif found := self._call(key, ("XREVRANGE", key, "+", "-", "COUNT", 1)):
                last[key] = found[0][0].decode()
        return last

    def events(self, span: Span) -> list[Reply]:
        found: list[Reply] = []
        after = _id(span.start)
        while len(found) < span.events:
            count = min(_AT_ONCE, span.events - len(found))
            more = self._call(span.partition, ("XRANGE", span.partition, f"({after}", _id(span.stop), "COUNT", count))
            found += more
            if len(more) < count:
                raise BadInput(
                    f"{self._name}: {span.events - len(found)} of the {span.events} entries of {span.partition!r} from "
                    f"{_id(span.start)} to {_id(span.stop)} were trimmed or deleted before they were trained"
                )
            after = self.position(more[-1])
        return found

    def position(self, event: Reply) -> str:
        return cast("bytes", event[0]).decode()

    def payload(self, event: Reply) -> bytes:
        _, fields = event
        if fields[0] != self._field or len(fields) > 2:
            fields = [value for name, value in zip(fields[::2], fields[1::2], strict=True) if name == self._field]
            if not fields:
                raise BadInput(f"the entry has no field {self._field.decode()!r}; field= names the one of the event")
        return cast("bytes", fields[-1])

    def payloads(self, events: Sequence[Reply]) -> Sequence[bytes]:
        """In one pass over entries of one field each, which all of them are as a rule."""
        only = [fields[1] for _, fields in events if len(fields) == 2 and fields[0] == self._field]
        return only if len(only) == len(events) else super().payloads(events)

    def _call(self, key: str, command: Command) -> Reply:
        with self._connecting:
            if self._topology is None:
                self._topology = Topology(self._url)
                weakref.finalize(self._topology, self._topology.pool.close)  # a reader is closed by nobody
        (reply,) = self._topology.call([(key.encode(), command)], Deadline(self._url.deadline))
        return reply


def _parsed(position: str, name: str) -> tuple[str, int, str]:
    """Entry id, number and deleted entry of a position. Raises `BadInput` where it is none."""
    if not (found := _POSITION.fullmatch(position)):
        raise BadInput(f"{name}: position {position[:60]!r}: write the id of an entry, such as 1764288000000-0")
    return found[1], int(found[2] or 0), found[3] or ""


def _order(entry: str) -> tuple[int, ...]:
    """Sorts ids of entries."""
    return tuple(map(int, entry.split("-")))


def _id(position: str) -> str:
    return position.partition("/")[0]
