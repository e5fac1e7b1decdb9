"""What a server may answer to each command, and what its error replies mean."""

from collections.abc import Sequence
from typing import Any, cast

import hiredis

from elastable.embedding_store.errors import ElastableError, NotReady, StoreFailed
from elastable.embedding_store.tiers.redis.url import FILE_VARIABLE, RedisUrl

Command = tuple[str | bytes | int | float, ...]
"""A command and its arguments."""

Reply = Any
"""What a server answers to a command, as hiredis reads it: bytes, an int, None, a list of these, or its `ReplyError`.
`require_shapes` has refused it unless its shape is that of the command."""


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
            fits = isinstance(reply, bytes)
        else:
            fits = _fits(command, reply)
        if name in ("MULTI", "EXEC"):
            queued = [] if name == "MULTI" else None
        elif queued is not None:
            queued.append(command)
        if not fits:
            raise StoreFailed(f"redis at {who} answered {name} with {repr(reply)[:80]}, which is no answer to it")


def first_error(replies: Sequence[Reply]) -> str | None:
    """The first error line among the replies, and those of an EXEC that is the last of them; None: there is none."""
    executed = replies[-1] if isinstance(replies[-1], list) else []
    return next((str(reply) for reply in (*replies, *executed) if isinstance(reply, hiredis.ReplyError)), None)


def _executed(commands: Sequence[Command], replies: object) -> bool:
    return (
        isinstance(replies, list)
        and len(replies) == len(commands)
        and all(
            isinstance(reply, hiredis.ReplyError) or _fits(command, reply)
            for command, reply in zip(commands, replies, strict=True)
        )
    )


def _fits(command: Command, reply: object) -> bool:
    """Whether a reply outside of a transaction has the shape of those to the command."""
    match str(command[0]), reply:
        case "CLUSTER", list(ranges):
            return all(map(_is_slot_range, ranges))
        case "HMGET", list(values):
            return len(values) == len(command) - 2 and all(isinstance(one, bytes | None) for one in values)
        case "HGETALL", list(pairs):
            return _are_texts(pairs) and len(pairs) % 2 == 0
        case "HSCAN", [bytes(), list(pairs)]:
            return _are_texts(pairs) and len(pairs) % 2 == 0
        case ("HKEYS", list(keys)) | ("SCAN", [bytes(), list(keys)]):
            return _are_texts(keys)
        case "XINFO", list(pairs):
            return len(pairs) % 2 == 0 and _are_texts(pairs[::2])
        case "EVAL_RO", []:
            return True
        case "EVAL_RO", [list(pairs), bytes()]:  # the one script that there is, of streams that are trained on
            return len(pairs) % 2 == 0 and _are_texts(pairs[::2])
        case (("XRANGE" | "XREVRANGE"), list(entries)):
            return _are_entries(entries)
        case ("WAITAOF", list()) | ("GET" | "HGET", None):
            return True
        case "CLIENT", bytes():
            return command[1] != "KILL"
        case "CLIENT", int(count):
            return command[1] == "KILL" and count >= 0
        case (
            ("DEL" | "EXISTS" | "HDEL" | "HLEN" | "HSET" | "HSETNX" | "HSTRLEN" | "UNLINK" | "XDEL" | "XTRIM"),
            int(count),
        ):
            return count >= 0
        case (("ASKING" | "BGREWRITEAOF" | "INFO" | "MULTI" | "PING"), bytes()):
            return True
        case (("GET" | "HGET" | "SET" | "TYPE" | "UNWATCH" | "WATCH" | "XSETID"), bytes()):
            return True
    return False


def _are_texts(reply: list[object]) -> bool:
    return all(isinstance(one, bytes) for one in reply)


def _are_entries(reply: list[Any]) -> bool:
    """Whether these are entries of a stream, however many."""
    if {*map(type, reply)} != {list} or {*map(len, reply)} != {2}:
        return not reply
    ids, fields = zip(*reply, strict=True)
    return {*map(type, ids)} == {bytes} and {*map(type, fields)} == {list}


def _is_slot_range(entry: object) -> bool:
    match entry:
        case [int(first), int(last), [bytes() | None, int(port), *_], *_]:
            return min(first, last, port) >= 0
    return False


# What an error reply of a Redis server means: a failure that lasts, or one that another attempt may mend


#: First words of error replies that end by themselves: the data set is being loaded after a restart, a replica has lost
#: its master, a script of somebody else's runs, slots of a Cluster move or have no owner until a failover is over.
_TRANSIENT = ("LOADING", "MASTERDOWN", "BUSY", "TRYAGAIN", "CLUSTERDOWN")

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


def refuse_errors(answers: Sequence[Reply], what: str, url: RedisUrl) -> None:
    """Raises `reply_error` for the first error line among answers, and of an EXEC that is the last of them."""
    if (error := first_error(answers)) is not None:
        raise reply_error(what, error, url)


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
