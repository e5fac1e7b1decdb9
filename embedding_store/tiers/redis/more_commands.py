"""Further commands of transactions that write rows, encoded and side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.tiers.redis.resp_codec import Bytes

__all__ = ["MoreCommands"]


@dataclass(frozen=True, slots=True)
class MoreCommands:
    """Further commands of some transactions, encoded.

    Attributes:
        text: uint8; those of transaction c are `text[at[c]:at[c + 1]]`.
        at: int64 `[transactions + 1]`.
        count: int64 `[transactions]`, how many commands.
    """

    text: Bytes
    at: Int64
    count: Int64

    @classmethod
    def none(cls, transactions: int) -> MoreCommands:
        """No further commands."""
        return cls(np.empty(0, np.uint8), np.zeros(transactions + 1, np.int64), np.zeros(transactions, np.int64))

    @classmethod
    def of_parts(cls, parts: Sequence[Sequence[bytes]]) -> MoreCommands:
        """From the encoded commands of each transaction."""
        joined = [b"".join(commands) for commands in parts]
        at = np.zeros(len(joined) + 1, np.int64)
        np.cumsum([len(text) for text in joined], out=at[1:])
        return cls(np.frombuffer(b"".join(joined), np.uint8), at, np.array([len(part) for part in parts], np.int64))

    def and_then(self, parts: Sequence[Sequence[bytes]]) -> MoreCommands:
        """These, and further ones of each transaction behind them."""
        ends = zip(self.at[:-1].tolist(), self.at[1:].tolist(), strict=True)
        texts = [self.text[start:stop].tobytes() for start, stop in ends]
        joined = MoreCommands.of_parts([[text, *part] for text, part in zip(texts, parts, strict=True)])
        return MoreCommands(joined.text, joined.at, joined.count - 1 + self.count)

    def chosen(self, transactions: Int64) -> MoreCommands:
        """Those of some transactions, int64 `[n]`: all of them, or a few."""
        if len(transactions) == len(self.count):
            return self
        parts = [self.text[self.at[c] : self.at[c + 1]] for c in transactions.tolist()]
        at = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=at[1:])
        return MoreCommands(np.concatenate((self.text[:0], *parts)), at, self.count[transactions])

    def of(self, start: int, stop: int) -> tuple[Bytes, Int64]:
        """`text` and `at` of the transactions `start..stop`."""
        return self.text, self.at[start : stop + 1]
