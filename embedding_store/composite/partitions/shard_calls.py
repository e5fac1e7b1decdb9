"""Several stores asked at once, one thread each; errors say which of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

__all__ = ["ShardCalls"]

T = TypeVar("T")

_DEADLINE_S = 600.0  # every store has a deadline of its own; this only keeps a dead thread from hanging its caller
_CALLERS = 4  # that are served side by side without waiting for each other's threads


class ShardCalls:
    """Threads for calls to shards; they live as long as their owner.

    Args:
        shards: How many there are.
        why_lost: (shard, what it raised) -> how one sees that it has lost its rows; "" where it has not.
    """

    def __init__(self, shards: int, why_lost: Callable[[int, ElastableError], str] = lambda shard, error: "") -> None:
        self._shards = shards
        self._why_lost = why_lost
        # The caller works too. Threads are started when they are first needed.
        others = _CALLERS * (shards - 1)
        self._executor = ThreadPoolExecutor(others, thread_name_prefix="shard") if others else None

    def outcomes(
        self, calls: Mapping[int, Callable[[], T]], together: bool = True
    ) -> tuple[dict[int, T], dict[int, Exception]]:
        """Makes all calls; by shard, what they returned and what they raised.

        Args:
            calls: Shard -> what to call.
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
                for shard, call in list(calls.items())[1:]:
                    started[shard] = executor.submit(call)
            for shard, call in calls.items():
                if shard not in started:
                    _keep(shard, call, results, errors)
        except RuntimeError as error:  # of the executor alone: whatever a call raises is kept
            raise StoreFailed("the store of several shards is closed") from error
        finally:
            unfinished = wait(started.values(), timeout=_DEADLINE_S).not_done
        if unfinished:
            raise StoreFailed(f"{len(unfinished)} of {len(calls)} shards did not answer within {_DEADLINE_S:.0f} s")
        for shard, future in started.items():
            _keep(shard, future.result, results, errors)
        return results, errors

    def run(self, calls: Mapping[int, Callable[[], T]], together: bool = True) -> dict[int, T]:
        """As `outcomes`, where every call has to succeed.

        Raises:
            StoreFailed: a call did not end.
            Exception: what the first shard that failed raised, naming the shard; every call has ended.
        """
        results, errors = self.outcomes(calls, together)
        if errors:
            self.raise_first(errors)
        return results

    def raise_first(self, errors: Mapping[int, Exception]) -> NoReturn:
        """Raises the error of the first shard that has one, saying which shard it is; that of a lost shard before all.

        Raises:
            ShardLost: a shard has lost its rows.
            ShardAway: a shard cannot be reached.
        """
        named = {shard: self._named(shard, error) for shard, error in sorted(errors.items())}
        shard = min(named, key=lambda shard: (_rank(named[shard]), shard))
        if named[shard] is errors[shard]:
            raise errors[shard]
        raise named[shard] from errors[shard]

    def _named(self, shard: int, error: Exception) -> Exception:
        """The error, saying which shard it is from."""
        where = f"shard {shard} of {self._shards}"
        if not isinstance(error, ElastableError):
            error.add_note(f"on {where}")
            return error
        if isinstance(error, StoreBroken):
            return ShardLost(f"{where} is lost: {error}")
        if isinstance(error, Unavailable) and not isinstance(error, NotReady):
            return ShardAway(f"{where}: {error}")
        if not isinstance(error, TakenOver) and (why := self._why_lost(shard, error)):
            return ShardLost(f"{where} is lost: {why}")
        return type(error)(f"{where}: {error}")

    def close(self) -> None:
        """Ends the threads; afterwards calls are made one after the other."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True)


def _rank(error: Exception) -> int:
    """Which error tells most of what is wrong: the least."""
    kinds = TakenOver, ShardLost, ShardAway
    return next((number for number, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))


def _keep(shard: int, call: Callable[[], T], results: dict[int, T], errors: dict[int, Exception]) -> None:
    try:
        results[shard] = call()
    except Exception as error:  # noqa: BLE001 - raised once all calls have ended
        errors[shard] = error
