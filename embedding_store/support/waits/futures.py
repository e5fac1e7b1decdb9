"""Results that come later, as `concurrent.futures.Future`."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar

__all__ = ["at_once", "settle", "settle_error"]

T = TypeVar("T")


def at_once(value: T) -> Future[T]:
    """A future that has its result already."""
    done: Future[T] = Future()
    done.set_result(value)
    return done


def settle(future: Future[T], value: T) -> None:
    """Gives a future its result, unless it has one, or was cancelled."""
    with suppress(InvalidStateError):
        future.set_result(value)


def settle_error(future: Future[T], error: BaseException) -> None:
    """Gives a future its error, unless it has a result, or was cancelled."""
    with suppress(InvalidStateError):
        future.set_exception(error)
