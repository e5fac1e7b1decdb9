"""What an error reply of a Redis server means: a failure that lasts, or one that another attempt may mend."""

from __future__ import annotations

from elastable.embedding_store.errors import ElastableError, NotReady, StoreFailed
from elastable.embedding_store.tiers.redis.login import FILE_VARIABLE
from elastable.embedding_store.tiers.redis.url import RedisUrl

__all__ = ["is_transient", "reply_error"]

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
