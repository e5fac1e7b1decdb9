"""When versions of a table were committed: which of them are longer ago than its rows may stay untouched."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput

__all__ = ["TouchTimes"]

_SPANS = 1024  # into which the time that rows may stay is divided
_MOST_SPANS = _SPANS + 8
_MOST_MS = 1 << 62

_Span = tuple[int, int, int]
"""The last of some consecutive versions, and when the first and the last of them were committed, in milliseconds."""


class TouchTimes:
    """Times of versions. Rows keep the version that touched them, and no time: this says which versions are too old.

    Versions that were committed within a 1024th of `ttl` count as committed with the last of them, so that it takes
    some kilobytes whatever the pace of commits. A row therefore goes that much too late at most, and never too early.
    """

    def __init__(self, table: str, ttl: float) -> None:
        """`ttl`: seconds that rows may stay untouched."""
        self._table = table
        self._ttl_ms = max(1, round(1000 * ttl))
        self._span_ms = -(-self._ttl_ms // _SPANS)
        self._spans: list[_Span] = []  # the oldest first; of those that are too old, one

    def note(self, version: int, time: float) -> None:
        """A version is committed at a time, in seconds since 1970; where the clock went back, when the last was.

        Later versions are no more: the store was reset to an earlier one.
        """
        now = int(1000 * time)
        if self._spans:
            now = max(now, self._spans[-1][2])
        self._forget_from(version)
        if self._spans:
            _, began, _ = self._spans[-1]
            if now - began < self._span_ms:
                self._spans[-1] = version, began, now
                return
        self._spans.append((version, now, now))
        while len(self._spans) > 1 and self._spans[1][2] < now - self._ttl_ms:
            del self._spans[0]

    def _forget_from(self, version: int) -> None:
        while self._spans and self._spans[-1][0] >= version:
            _, began, last = self._spans.pop()
            before = self._spans[-1][0] if self._spans else 0
            if before < version - 1:
                self._spans.append((version - 1, began, last))

    @property
    def oldest(self) -> int:
        """Rows that no version from this one on has touched, were last touched more than `ttl` seconds ago."""
        gone = [version for version, _, last in self._spans if last < self._spans[-1][2] - self._ttl_ms]
        return gone[-1] + 1 if gone else 0

    def oldest_at(self, version: int, time: float) -> int:
        """What `oldest` would be, were a version committed at a time; notes nothing."""
        then = TouchTimes(self._table, self._ttl_ms / 1000)
        then._spans = self._spans.copy()
        then.note(version, time)
        return then.oldest

    def read(self) -> Int64:
        """`TableState.touch_times`, a copy."""
        return np.array(self._spans, np.int64).reshape(-1, 3)

    def write(self, times: Int64) -> None:
        """Restores what `read` returned, of what `require` takes."""
        self._spans = [(int(version), int(began), int(last)) for version, began, last in times]

    def require(self, times: Int64) -> None:
        """Raises `BadInput` for what no `read` returns."""
        if not isinstance(times, np.ndarray) or times.dtype != np.int64 or times.shape != (len(times), 3):
            got = f"{times.dtype} {list(times.shape)}" if isinstance(times, np.ndarray) else type(times)
            raise BadInput(f"table {self._table!r}: touch times must be int64 [spans, 3], got {got}")
        versions, spans = times[:, 0], times[:, 1:].reshape(-1)
        ordered = bool((np.diff(versions) > 0).all() and (np.diff(spans) >= 0).all())
        bounded = len(times) <= _MOST_SPANS and not ((times < 0) | (times > _MOST_MS)).any()
        if not (ordered and bounded):
            raise BadInput(
                f"table {self._table!r}: touch times must be at most {_MOST_SPANS} rows of a version and two times, "
                "none negative and in ascending order"
            )
