"""A job whose store is taken over or lost fails at once, and not at its next commit."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, ElastableError, StoreBroken, TakenOver, Unavailable
from elastable.embedding_store.support.retry import given_up
from elastable.process.repeating import repeating

_LOOK_EVERY_S = 1.0


class StoreHealth:
    """Whether a store answers and is this process's, as of the last look at it."""

    def __init__(self) -> None:
        self._problem: str | None = None

    def not_ready(self) -> str | None:
        """Why it cannot be used; None: it can."""
        return self._problem

    def look(self, store: EmbeddingStore, least: int = 0) -> None:
        """Looks at the store now.

        Raises:
            TakenOver, StoreBroken: it is another's, or is at a version before `least`: it has lost its rows.
            ElastableError: it does not answer.
        """
        try:
            store.require_owner()
            version = store.version()
            if version < least:
                raise StoreBroken(f"the store is at version {version}, and held {least}: it has lost its rows")
        except ElastableError as error:
            self._problem = f"{type(error).__name__}: {error}"
            raise
        self._problem = None

    def watching(
        self,
        store: EmbeddingStore,
        lost: Callable[[ElastableError], None],
        least: Callable[[], int] = lambda: 0,
        deadline_s: float = math.inf,
    ) -> AbstractContextManager[None]:
        """While the block runs, the store is looked at every second.

        A job fails so as soon as its store has another owner, or has lost what it held. Otherwise its workers would
        read another job's versions meanwhile, or none, and report nothing, so no commit would ever find out.

        Args:
            store: This process's.
            lost: Called once it is another's, or has lost its rows, or was away; after that nobody looks any more.
            least: The version that the store is at, or beyond.
            deadline_s: How long it, or a shard of it, may be unreachable.
        """
        answered = time.monotonic()

        def look() -> bool:
            nonlocal answered
            try:
                self.look(store, least())
                answered = time.monotonic()
            except (TakenOver, StoreBroken) as error:
                lost(error)
                return True
            except Unavailable as error:
                if time.monotonic() - answered > deadline_s:
                    lost(given_up(error, deadline_s))
                    return True
            except ElastableError:
                pass  # it may answer again; whoever needs it now reports it
            return False

        return repeating(look, _LOOK_EVERY_S, "elastable-store-watch")


_OWNER_LEAVES_S = 5.0  # a server may notice a little later that a process has died


def refuse_live_owner(other_writer: Callable[[], str | None]) -> None:
    """Raises `BadInput` where another process writes to the store, one that was killed just now excepted.

    Args:
        other_writer: As `EmbeddingStore.other_writer`.
    """
    give_up = time.monotonic() + _OWNER_LEAVES_S
    while (writer := other_writer()) is not None:
        if time.monotonic() > give_up:
            raise BadInput(
                f"the store is in use: {writer} (host:process) is connected to write to it. Stop that one first, give "
                "this one another ?namespace= in the store's URL, or have a job take the store from it with --take-over"
            )
        time.sleep(0.1)
