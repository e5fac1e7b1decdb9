"""What tables are called in a tier: by their own names, as long as nothing older is in the way."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["TierNames"]


class TierNames:
    """Names in use. A table that is cleared or dropped stays in the tier until the engine's state is without it."""

    def __init__(self, used: Iterable[str] = ()) -> None:
        """`used`: names of tables that are in the tier."""
        self._used = set(used)
        self._retired: list[str] = []

    def new(self, table: str) -> str:
        """A name for a table that nothing in the tier has."""
        name, number = table, 1
        while name in self._used:
            number += 1
            name = f"{table}~{number}"
        self._used.add(name)
        return name

    def retire(self, name: str) -> None:
        """Nobody needs this table of the tier any more, once the next state is there."""
        self._retired.append(name)

    def retired(self) -> list[str]:
        """Names of tables to delete; `forget` them once they are gone."""
        return list(self._retired)

    def forget(self, names: Iterable[str]) -> None:
        """These tables are gone from the tier."""
        for name in names:
            self._retired.remove(name)
            self._used.discard(name)
