"""Memory shared out among tables: all of what they need, or an even share of what there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["RowBudget", "even_shares"]


class RowBudget:
    """Bytes for the rows of several tables. Callers do the locking."""

    def __init__(self, total: int) -> None:
        """`total`: bytes to share out."""
        self.total = total
        self._tables: dict[object, tuple[int, Callable[[int], None]]] = {}

    def declare(self, table: object, need: int, resize: Callable[[int], None]) -> None:
        """A table is there, or needs more: every table's `resize` is called with its share.

        Args:
            table: Whoever needs memory, to be told apart from others.
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
