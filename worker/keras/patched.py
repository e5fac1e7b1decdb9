"""Replaces a method of Keras for a while, in one thread only."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Method = Callable[..., object]


class _Patch:
    """A method that calls the calling thread's replacement, if there is one."""

    def __init__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name
        self.plain: Method = getattr(owner, name)
        self.blocks = 0  # that use it, nested or in several threads
        self._local = threading.local()

    @property
    def replacements(self) -> list[Method]:
        """The replacements of the calling thread, the innermost last."""
        stack: list[Method] = self._local.__dict__.setdefault("stack", [])
        return stack

    def install(self) -> None:
        @functools.wraps(self.plain)  # Keras reads the arguments of `build`
        def method(*arguments: object, **options: object) -> object:
            stack = self.replacements
            return (stack[-1] if stack else self.plain)(*arguments, **options)

        setattr(self.owner, self.name, method)

    def remove(self) -> None:
        setattr(self.owner, self.name, self.plain)


# Held only while a patch is installed or removed. A block may wait for another thread's block: replicas that
# build one model each exchange rows within it.
_LOCK = threading.Lock()
_PATCHES: dict[tuple[type, str], _Patch] = {}


@contextmanager
def patched(owner: type, name: str, replacement: Method) -> Iterator[None]:
    """Within the block, calls of `owner.name` from this thread go to `replacement`.

    Calls from other threads go where they went before; blocks of several threads run side by side.

    Args:
        replacement: Called with the method as the thread saw it before, the object, and the arguments of the call.
    """
    key = (owner, name)
    with _LOCK:
        patch = _PATCHES.get(key)
        if patch is None:
            patch = _PATCHES[key] = _Patch(owner, name)
            patch.install()
        patch.blocks += 1
    stack = patch.replacements
    stack.append(functools.partial(replacement, stack[-1] if stack else patch.plain))
    try:
        yield
    finally:
        stack.pop()
        with _LOCK:
            patch.blocks -= 1
            if not patch.blocks:
                patch.remove()
                del _PATCHES[key]
