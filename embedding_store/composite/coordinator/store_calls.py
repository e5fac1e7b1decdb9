"""Calls to several stores at once, one thread each; errors name the store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NoReturn, TypeVar

from elastable.embedding_store.errors import (
    ElastableError,
    NotReady,
    ShardAway,
    ShardLost,
    StoreBroken,
    StoreFailed,
    TakenOver,
    Unavailable,
)
from elastable.embedding_store.measures.spans import carried

__all__ = ["StoreCalls"]

T = TypeVar("T")

_DEADLINE_S = 600.0  # every store has its own deadline; this only keeps a dead thread from hanging its caller
_CALLERS = 4  # at once, without waiting for each other's threads


class StoreCalls:
    """Threads for calls to stores; they live as long as their owner.

    Args:
        names: What errors call each store.
        why_lost: (store, what it raised) -> the sign that it has lost its rows; "" if there is none.
    """

    def __init__(
        self, names: Sequence[str], why_lost: Callable[[int, ElastableError], str] = lambda store, error: ""
    ) -> None:
        self.names = names
        self._why_lost = why_lost
        # The calling thread makes one of the calls. The executor starts threads when they are first needed.
        others = _CALLERS * (len(names) - 1)
        self._executor = ThreadPoolExecutor(others, thread_name_prefix="shard") if others else None

    def outcomes(
        self, calls: Mapping[int, Callable[[], T]], together: bool = True
    ) -> tuple[dict[int, T], dict[int, Exception]]:
        """Makes all calls; by store, what they returned and what they raised.

        Args:
            calls: Store -> what to call.
            together: Whether to use threads; else one after the other.

        Raises:
            StoreFailed: a call did not end.
        """
        started: dict[int, Future[T]] = {}
        results: dict[int, T] = {}
        errors: dict[int, Exception] = {}
        executor = self._executor if together else None
        try:
            if executor is not None:
                for store, call in list(calls.items())[1:]:
                    started[store] = executor.submit(carried(call))
            for store, call in calls.items():
                if store not in started:
                    _keep(store, call, results, errors)
        except RuntimeError as error:  # of the executor alone: whatever a call raises is kept
            raise StoreFailed("the store is closed") from error
        finally:
            unfinished = wait(started.values(), timeout=_DEADLINE_S).not_done
        if unfinished:
            raise StoreFailed(f"{len(unfinished)} of {len(calls)} stores did not answer within {_DEADLINE_S:.0f} s")
        for store, future in started.items():
            _keep(store, future.result, results, errors)
        return results, errors

    def run(self, calls: Mapping[int, Callable[[], T]], together: bool = True) -> dict[int, T]:
        """What all calls returned, by store.

        Raises:
            StoreFailed: a call did not end.
            Exception: what the first store that failed raised, naming the store; every call has ended.
        """
        results, errors = self.outcomes(calls, together)
        if errors:
            self.raise_first(errors)
        return results

    def raise_first(self, errors: Mapping[int, Exception]) -> NoReturn:
        """Raises the error of the first store that has one, naming the store; a lost store comes before all others.

        Raises:
            ShardLost: a store has lost its rows.
            ShardAway: a store cannot be reached.
        """
        named = {store: self._named(store, error) for store, error in sorted(errors.items())}
        store = min(named, key=lambda store: (_rank(named[store]), store))
        if named[store] is errors[store]:
            raise errors[store]
        raise named[store] from errors[store]

    def _named(self, store: int, error: Exception) -> Exception:
        """The error, naming the store that raised it."""
        where = self.names[store]
        if not isinstance(error, ElastableError):
            error.add_note(f"on {where}")
            return error
        if isinstance(error, StoreBroken):
            return ShardLost(f"{where} is lost: {error}")
        if isinstance(error, Unavailable) and not isinstance(error, NotReady):
            return ShardAway(f"{where}: {error}")
        if not isinstance(error, TakenOver) and (why := self._why_lost(store, error)):
            return ShardLost(f"{where} is lost: {why}")
        return type(error)(f"{where}: {error}")

    def close(self) -> None:
        """Ends the threads; afterwards calls are made one after the other."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)


def _rank(error: Exception) -> int:
    """Orders errors by how much they explain: the lowest explains most."""
    kinds = TakenOver, ShardLost, ShardAway
    return next((number for number, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))


def _keep(store: int, call: Callable[[], T], results: dict[int, T], errors: dict[int, Exception]) -> None:
    try:
        results[store] = call()
    except Exception as error:  # noqa: BLE001 - raised once all calls have ended
        errors[store] = error
