"""What a server may answer to each command, and what its error replies mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, cast

import hiredis

from elastable.embedding_store.errors import ElastableError, NotReady, StoreFailed
from elastable.embedding_store.tiers.redis.url import FILE_VARIABLE, RedisUrl

__all__ = ["Command", "Reply", "is_transient", "packed_command", "reply_error", "require_shapes"]

Command = tuple[str | bytes | int | float, ...]
"""A command and its arguments."""

Reply = Any
"""What a server answers to a command, as hiredis reads it: bytes, an int, None, a list of these, or its `ReplyError`.
`require_shapes` has refused it unless its shape is that of the command."""

_Fits = Callable[[object, Command], bool]


def packed_command(command: Command) -> bytes:
    """The bytes that are sent for a command."""
    # hiredis declares a tuple of one element, and takes any number.
    packed: bytes = hiredis.pack_command(cast("tuple[str]", command))
    return packed


def require_shapes(commands: Sequence[Command], replies: Sequence[object], who: object) -> None:
    """Refuses replies that are none to these commands; errors of the server are replies to any.

    Args:
        commands: As they were sent, transactions among them.
        replies: One for each, as hiredis gives them.
        who: The server, for the message.

    Raises:
        StoreFailed: naming the server, the command and the beginning of the reply.
    """
    queued: list[Command] | None = None
    for command, reply in zip(commands, replies, strict=True):
        name = str(command[0])
        if isinstance(reply, hiredis.ReplyError):
            fits = True
        elif name == "EXEC":
            fits = reply is None or _executed(queued or [], reply)
        elif queued is not None:
            fits = _is_text(reply, command)
        else:
            fits = _SHAPES[name](reply, command)
        if name in ("MULTI", "EXEC"):
            queued = [] if name == "MULTI" else None
        elif queued is not None:
            queued.append(command)
        if not fits:
            raise StoreFailed(f"redis at {who} answered {name} with {repr(reply)[:80]}, which is no answer to it")


def _executed(commands: Sequence[Command], replies: object) -> bool:
    return (
        isinstance(replies, list)
        and len(replies) == len(commands)
        and all(
            isinstance(reply, hiredis.ReplyError) or _SHAPES[str(command[0])](reply, command)
            for command, reply in zip(commands, replies, strict=True)
        )
    )


def _is_text(reply: object, command: Command) -> bool:
    return isinstance(reply, bytes)


def _is_count(reply: object, command: Command) -> bool:
    return isinstance(reply, int) and reply >= 0


def _is_value(reply: object, command: Command) -> bool:
    return reply is None or isinstance(reply, bytes)


def _are_texts(reply: object, command: Command) -> TypeGuard[list[bytes]]:
    return isinstance(reply, list) and all(isinstance(one, bytes) for one in reply)


def _are_pairs(reply: object, command: Command) -> bool:
    return _are_texts(reply, command) and len(reply) % 2 == 0


def _are_values(reply: object, command: Command) -> bool:
    asked = len(command) - 2
    return isinstance(reply, list) and len(reply) == asked and all(_is_value(one, command) for one in reply)


def _is_page(reply: object, command: Command) -> bool:
    return isinstance(reply, list) and len(reply) == 2 and _is_text(reply[0], command) and _are_pairs(reply[1], command)


def _are_keys(reply: object, command: Command) -> bool:
    return isinstance(reply, list) and len(reply) == 2 and _is_text(reply[0], command) and _are_texts(reply[1], command)


def _is_of_client(reply: object, command: Command) -> bool:
    return _is_count(reply, command) if command[1] == "KILL" else _is_text(reply, command)


def _is_list(reply: object, command: Command) -> bool:
    return isinstance(reply, list)


def _are_streams(reply: object, command: Command) -> bool:
    return reply is None or isinstance(reply, list)


def _are_slots(reply: object, command: Command) -> bool:
    return isinstance(reply, list) and all(
        isinstance(one, list)
        and len(one) >= 3
        and all(_is_count(number, command) for number in one[:2])
        and isinstance(one[2], list)
        and len(one[2]) >= 2
        and _is_value(one[2][0], command)
        and _is_count(one[2][1], command)
        for one in reply
    )


_SHAPES: dict[str, _Fits] = {
    **dict.fromkeys(
        (
            "ASKING",
            "AUTH",
            "BGREWRITEAOF",
            "INFO",
            "MULTI",
            "PING",
            "RENAME",
            "SELECT",
            "SET",
            "TYPE",
            "UNWATCH",
            "WATCH",
        ),
        _is_text,
    ),
    **dict.fromkeys(("DEL", "EXISTS", "HDEL", "HLEN", "HSET", "HSETNX", "UNLINK"), _is_count),
    **dict.fromkeys(("ZADD", "ZCARD", "ZCOUNT"), _is_count),
    **dict.fromkeys(("GET", "HGET"), _is_value),
    "CLIENT": _is_of_client,
    "CLUSTER": _are_slots,
    "HGETALL": _are_pairs,
    "HKEYS": _are_texts,
    "HMGET": _are_values,
    "HSCAN": _is_page,
    "SCAN": _are_keys,
    **dict.fromkeys(("XDEL", "XTRIM"), _is_count),
    **dict.fromkeys(("XRANGE", "XREVRANGE", "WAITAOF"), _is_list),
    "XREAD": _are_streams,
    "XSETID": _is_text,
    "ZRANGE": _are_pairs,
}


# What an error reply of a Redis server means: a failure that lasts, or one that another attempt may mend


#: First words of error replies that end by themselves: the data set is being loaded after a restart, a replica has lost
#: its master, a script of somebody else's runs, slots of a Cluster move or have no owner until a failover is over, a
#: wait for entries of a stream ends as its server becomes a replica.
_TRANSIENT = ("LOADING", "MASTERDOWN", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "UNBLOCKED")

_SERVER_ADVICE = {
    "OOM": "the server is full: raise its maxmemory, or delete other keys; nothing was written",
    "MISCONF": "the server cannot write its own files: free its disk; nothing was written",
    "NOREPLICAS": "too few replicas of the server are connected, see its min-replicas-to-write; nothing was written",
}


def is_transient(line: str) -> bool:
    """Whether an error reply, without its leading `-`, tells of a state that passes by itself."""
    return line.split(" ", 1)[0] in _TRANSIENT


def reply_error(what: str, line: str, url: RedisUrl) -> ElastableError:
    """The error for an error reply: `NotReady` where the same request may succeed later, else `StoreFailed`.

    Args:
        what: Which server did what; begins the message.
        line: The error reply.
        url: Of the store, for advice about a login.
    """
    kind = NotReady if is_transient(line) else StoreFailed
    return kind(f"{what}: {line}{_login_advice(url, line)}{_server_advice(line)}")


def _login_advice(url: RedisUrl, error: str) -> str:
    """What to do about an error of a server that has to do with the login; "" for other errors."""
    user = f"user {url.username!r}" if url.username else "the default user"
    if error.startswith("NOAUTH"):
        return f" (this process gives no password: set {FILE_VARIABLE}, or write redis://user:password@host:port)"
    if error.startswith("WRONGPASS"):
        return f" (the password is not that of {user}; special characters in a URL are percent-encoded)"
    if error.startswith("NOPERM"):
        return f" ({user} of the store's URL may not do that: docs/redis.md lists what is needed)"
    return ""


def _server_advice(error: str) -> str:
    """What to do about an error of a server that takes no writes; "" for other errors."""
    for word, advice in _SERVER_ADVICE.items():
        if word in error.replace(":", " ").split():
            return f" ({advice})"
    return ""
