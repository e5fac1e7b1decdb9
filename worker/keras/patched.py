"""A method of Keras that is another one for a while, in one thread."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["patched"]

# Two threads that replace and restore by turns would leave the one's method behind for good.
_PATCHING = threading.RLock()


@contextmanager
def patched(owner: type, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While the block runs, calls of `owner.name` in this thread are those of `made(the method as it was)`.

    Calls in other threads are those of the method as it was; other threads that patch wait.

    Args:
        owner: A class.
        name: Of one of its methods.
        made: Takes the method as it was, and gives what stands in its place.
    """
    with _PATCHING:
        plain, here = getattr(owner, name), threading.get_ident()
        mine = made(plain)

        @functools.wraps(mine)  # Keras reads the arguments of `build`
        def method(*arguments: Any, **options: Any) -> Any:
            return (mine if threading.get_ident() == here else plain)(*arguments, **options)

        setattr(owner, name, method)
        try:
            yield
        finally:
            setattr(owner, name, plain)
