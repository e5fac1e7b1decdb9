"""Something that is done in a fork, while the conductor's loop goes on."""

from __future__ import annotations

import json
import os
import selectors
from collections.abc import Callable

__all__ = ["beside"]

_CHUNK = 1 << 16


def beside(look: Callable[[], list[str]], selector: selectors.BaseSelector, turn: Callable[[], None]) -> list[str]:
    """What `look` says in a fork, while bytes go on passing the links here.

    Args:
        look: Called in a process of its own; its error is what it says, where it raises one.
        selector: The conductor's.
        turn: Turns the conductor's loop once.
    """
    heard, said = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            told = look()
        except BaseException as error:  # noqa: BLE001 - nothing of the parent may run on here
            told = [f"{type(error).__name__}: {error}"]
        os.write(said, json.dumps(told).encode())
        os._exit(0)
    os.close(said)
    received: list[bytes] = []
    selector.register(heard, selectors.EVENT_READ, lambda _: received.append(os.read(heard, _CHUNK)))
    while not received or received[-1]:
        turn()
    selector.unregister(heard)
    os.close(heard)
    os.waitpid(pid, 0)
    found: list[str] = json.loads(b"".join(received))
    return found
