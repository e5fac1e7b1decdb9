"""Clicks of users whose tastes drift: what is liked now is not in a minute."""

import json

import numpy as np
import redis

KEY = "clicks"
USERS, SEGMENTS, ITEMS = 2_000, 4, 200
TURN_S = 160.0  # in which a segment goes from liking an item to disliking it, and back
KEPT = 200_000  # events of the stream; older ones are trimmed

Events = dict[str, np.ndarray]


class Tastes:
    """Draws events: user, segment, item, and whether it was clicked, int64 `[events]` each."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._phase = self._random.uniform(0, 2 * np.pi, (SEGMENTS, ITEMS))
        self._user = self._random.normal(0, 0.5, USERS)

    def draw(self, events: int, seconds: float) -> Events:
        """Events of that moment."""
        user, item = self._random.integers(USERS, size=events), self._random.integers(ITEMS, size=events)
        segment = user % SEGMENTS
        liked = 2.5 * np.cos(self._phase[segment, item] + 2 * np.pi * seconds / TURN_S) + self._user[user]
        clicked = self._random.random(events) < 1 / (1 + np.exp(-liked))
        return {"user": user, "segment": segment, "item": item, "clicked": clicked.astype(np.int64)}


def send(client: redis.Redis, events: Events) -> None:
    """Adds the events to the stream, one entry each."""
    columns = [column.tolist() for column in events.values()]
    with client.pipeline(transaction=False) as pipe:
        for values in zip(*columns, strict=True):
            event = json.dumps(dict(zip(events, values, strict=True)))
            pipe.xadd(KEY, {"event": event}, maxlen=KEPT, approximate=True)
        pipe.execute()
