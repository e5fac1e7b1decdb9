"""How much memory this process may use, and how tables share it."""

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup/memory.max")
_LEAST_DIRECT = 1 << 30
_SHARE = 8
_BEFORE_IMAGES = 4
_LEAST_BUDGET = 1 << 30
_LEAST_HELD = 1 << 30
_BUDGET = 4


@lru_cache(maxsize=1)
def memory_limit() -> int:
    """Bytes: the machine's memory, or less where a container may have less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        allowed = _CGROUP.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return machine
    return min(machine, int(allowed)) if allowed.isdecimal() else machine


def direct_bytes_here() -> int:
    """Bytes up to which a fixed table is laid out whole: an eighth of the memory, at least 1 GiB.

    Laid out whole a row is found without an index, but rows touched here and
    there take a page each: a few such tables must fit.
    """
    return max(_LEAST_DIRECT, memory_limit() // _SHARE)


def before_image_bytes_here() -> int:
    """Bytes that before-images of pinned versions may take where nothing else is said: a quarter of the memory."""
    return memory_limit() // _BEFORE_IMAGES


def row_budget_here() -> int:
    """Bytes for hot rows of tables with a tier where nothing else is said: a quarter of the memory, at least 1 GiB."""
    return max(_LEAST_BUDGET, memory_limit() // _BUDGET)


def return_freed_memory() -> None:
    """Gives what this process has freed back to the system, as far as glibc can; without glibc nothing happens."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):
        return


# Memory shared out among tables: all of what they need, or an even share of what there is


class RowBudget:
    """Bytes for the rows of several tables. Callers do the locking."""

    def __init__(self, total: int) -> None:
        """`total`: bytes to share out."""
        self.total = total
        self._tables: dict[object, tuple[int, Callable[[int], None]]] = {}

    def declare(self, table: object, need: int, resize: Callable[[int], None]) -> None:
        """A table is there, or needs more: every table's `resize` is called with its share.

        Args:
            table: The name of the table that needs memory.
            need: Bytes that would hold all of its rows.
            resize: Takes the table's share, in bytes.
        """
        self._tables[table] = need, resize
        self._share_out()

    def withdraw(self, table: object) -> None:
        """A table is gone, or was never there; the others' shares grow when they next declare a need."""
        self._tables.pop(table, None)

    def _share_out(self) -> None:
        shares = even_shares([need for need, _ in self._tables.values()], self.total)
        for share, (_, resize) in zip(shares, list(self._tables.values()), strict=True):
            resize(share)


def even_shares(needs: Sequence[int], total: int) -> list[int]:
    """Shares of `total`: who needs less than an even share gets what it needs, the rest is split evenly.

    The shares add up to `total` at most, and none is above its need.
    """
    shares = [0] * len(needs)
    left = total
    waiting = sorted(range(len(needs)), key=lambda index: needs[index])
    while waiting:
        index = waiting.pop(0)
        shares[index] = min(needs[index], left // (len(waiting) + 1))
        left -= shares[index]
    return shares


class HeldBytes:
    """Bytes that a server holds for its clients: of each, and of all. Callers do the locking.

    Args:
        most: Of all; None: an eighth of the memory here, at least 1 GiB.
        of_a_client: Of one; None: half of that.
    """

    def __init__(self, most: int | None = None, of_a_client: int | None = None) -> None:
        self._most = max(_LEAST_HELD, memory_limit() // _SHARE) if most is None else most
        self._of_a_client = self._most // 2 if of_a_client is None else of_a_client
        self._held: dict[str, int] = {}

    def held(self, client: str) -> int:
        """Of a client; of "" all."""
        return self._held.get(client, 0)

    def full(self, client: str, size: int = 0) -> str | None:
        """Whose bytes leave no room for so many more, a client or ""; None: there is room, as for any alone."""
        for of, most in {"": self._most, client: self._of_a_client}.items():  # whoever is not known: as one client
            if (held := self._held.get(of, 0)) and held + size > most:
                return of
        return None

    def add(self, client: str, size: int) -> None:
        """Counts bytes of a client, or with a negative size no more; clients without any are forgotten."""
        for of in {"", client}:
            if held := self.held(of) + size:
                self._held[of] = held
            else:
                self._held.pop(of, None)
