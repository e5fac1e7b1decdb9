"""Transactions of control commands: at once or not at all, wherever their keys have moved to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
import numpy as np

from elastable.embedding_store.tiers.redis.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.reply_errors import reply_error
from elastable.embedding_store.tiers.redis.reply_shapes import Command
from elastable.embedding_store.tiers.redis.schema import hash_slot
from elastable.embedding_store.tiers.redis.topology import Route, Topology

__all__ = ["Transaction", "change_if_unchanged", "run_transactions"]

Transaction = tuple[bytes, Sequence[Command]]
"""A key, and commands whose keys all lie where that one lies."""

_PAUSE_S = 0.002


def run_transactions(
    topology: Topology, transactions: Sequence[Transaction], deadline: Deadline, repeat_lost: bool = True
) -> list[list[Any]]:
    """Runs each of the transactions at the owner of its key.

    Args:
        topology: The servers.
        transactions: Independent of each other.
        deadline: Of all together.
        repeat_lost: Run again what may have been done when a connection broke.

    Returns:
        What EXEC answered to each.

    Raises:
        StoreFailed: a server answered with an error.
        Unavailable, DeadlineExceeded: naming address and deadline.
    """
    results: list[list[Any]] = [[] for _ in transactions]

    def attempt(routes: list[Route]) -> dict[int, str]:
        failures: dict[int, str] = {}
        for route in routes:
            items = route.items.tolist()
            words = [_framed(transactions[item][1], route.asking) for item in items]
            replies = iter(topology.call_at(route.address, [command for group in words for command in group], deadline))
            for item, group in zip(items, words, strict=True):
                answers = [next(replies) for _ in group]
                error = _first_error(answers)
                if error is None:
                    results[item] = answers[-1]
                else:
                    failures[item] = error
        return failures

    slots = np.array([hash_slot(key) for key, _ in transactions], np.int64)
    topology.complete(slots, attempt, deadline, repeat_lost)
    return results


def _framed(commands: Sequence[Command], asking: bool) -> list[Command]:
    return [*([("ASKING",)] if asking else []), ("MULTI",), *commands, ("EXEC",)]


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
    change: Callable[[list[Any]], Sequence[Command]],
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
                answers = connection.call(_framed(commands, asking=False), deadline)
                if answers[-1] is not None:
                    error = _first_error(answers)
                    if error is None:
                        return
        if error is not None and not topology.passes(error):
            raise reply_error(f"redis at {topology.url} answered with an error", error, topology.url)
        time.sleep(min(_PAUSE_S, deadline.left(topology.url)))
