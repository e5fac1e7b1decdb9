"""What tests of streams of events share."""

from typing import Any

from elastable.master.api import BadEvent, Span
from elastable.worker.readers.streams.event_reader import EventReader


def whole(reader: EventReader, most: int = 100) -> list[Span]:
    """All that waits."""
    waits = reader.ahead({}, most, None).items()
    return [Span(name, each.start, each.stops[-1], len(each.stops)) for name, each in waits]


def read(reader: EventReader, *spans: Span) -> tuple[Any, tuple[BadEvent, ...]]:
    """The records of spans, of all that waits where none is named, and the bad events among them."""
    batch, bad = reader.read(spans or whole(reader))
    assert batch is not None
    return batch, bad
