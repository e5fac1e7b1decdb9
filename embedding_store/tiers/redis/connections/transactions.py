"""A transaction of control commands, repeated until nobody else has changed its keys in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import hiredis

from elastable.embedding_store.tiers.redis.connections.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.connections.reply_errors import reply_error
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command, Reply
from elastable.embedding_store.tiers.redis.connections.topology import Topology

__all__ = ["change_if_unchanged"]

_PAUSE_S = 0.002


def _first_error(answers: Sequence[object]) -> str | None:
    """The first error line among the answers to a transaction; None: it was executed."""
    inner = answers[-1] if isinstance(answers[-1], list) else []
    for answer in (*answers, *inner):
        if isinstance(answer, hiredis.ReplyError):
            return str(answer)
    return None if isinstance(answers[-1], list) else f"EXEC answered {answers[-1]!r}"


def change_if_unchanged(
    topology: Topology,
    watched: Sequence[bytes],
    questions: Sequence[Command],
    change: Callable[[list[Reply]], Sequence[Command]],
    deadline: Deadline,
) -> None:
    """Reads, decides, and writes, again and again until nobody else wrote in between.

    Args:
        topology: The servers.
        watched: Keys that nobody may change meanwhile, all in one hash slot.
        questions: Commands that read.
        change: From their answers to the commands that write; none: nothing is
            left to do. What it raises is passed on.
        deadline: Of everything together.

    Raises:
        StoreFailed: a server answered with an error.
        Unavailable, DeadlineExceeded: naming address and deadline; also where others never stopped writing.
    """
    while True:
        topology.call([(watched[0], ("TYPE", watched[0]))], deadline)  # whoever owns the slot now is known
        with topology.connection(watched[0], deadline) as connection:
            answers = connection.call([("WATCH", *watched), *questions], deadline)
            error = _first_error([*answers, []])
            if error is None:
                commands = change(answers[1:])
                if not commands:
                    connection.call([("UNWATCH",)], deadline)
                    return
                answers = connection.call([("MULTI",), *commands, ("EXEC",)], deadline)
                if answers[-1] is not None:
                    error = _first_error(answers)
                    if error is None:
                        return
        if error is not None and not topology.passes(error):
            raise reply_error(f"redis at {topology.url} answered with an error", error, topology.url)
        time.sleep(min(_PAUSE_S, deadline.left(topology.url)))
