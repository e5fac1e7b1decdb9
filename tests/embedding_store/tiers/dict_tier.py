"""The smallest tier: records in a dictionary. It shows how little a tier is, and fails wherever a test wants it to."""

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.tier import Records, Tier, TierTable
from elastable.embedding_store.errors import SpecConflict, TableNotFound, Unavailable


@dataclass
class Kept:
    """What outlives a `DictTier`, as a server outlives its clients."""

    tables: dict[str, TierTable] = field(default_factory=dict)
    rows: dict[str, dict[int, tuple[int, bytes]]] = field(default_factory=dict)  # by id or position: id and record
    sequence: int = 0
    state: bytes | None = None


class DictTier(Tier):
    place = "a dictionary"

    def __init__(self, kept: Kept | None = None, keeps_positions: bool = False) -> None:
        self.kept, self._keeps_positions = kept or Kept(), keeps_positions
        self.left: int | None = None  # records and other calls until it fails; None: it does not
        self._changing = threading.Lock()

    def copy(self) -> "DictTier":
        """What is left to a process that comes after one that died now: all of one moment, while flushes go on."""
        with self._changing:
            return DictTier(copy.deepcopy(self.kept), self._keeps_positions)

    def step(self) -> None:
        """Before each record that is written or deleted, and before each other call."""
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Unavailable("the tier fails, as the test wants")

    @property
    def keeps_positions(self) -> bool:
        return self._keeps_positions

    @property
    def sequence(self) -> int:
        return self.kept.sequence

    def tables(self) -> dict[str, TierTable]:
        return dict(self.kept.tables)

    def create(self, table: TierTable) -> None:
        self.step()
        if table.name in self.kept.tables:
            raise SpecConflict(f"there is a table {table.name!r} already")
        with self._changing:
            self.kept.tables[table.name], self.kept.rows[table.name] = table, {}

    def drop(self, table: str) -> None:
        self.step()
        with self._changing:
            self.kept.tables.pop(table, None)
            self.kept.rows.pop(table, None)

    def read(self, wanted: Sequence[Records]) -> list[Int64]:
        self.step()
        missing = []
        for records in wanted:
            rows = self._rows(records.table)
            found = [rows.get(key) for key in self._keys(records.ids, records.positions)]
            for target, row_id, row in zip(records.rows, records.ids.tolist(), found, strict=True):
                if row is not None:
                    assert row[0] == row_id
                    target[:] = np.frombuffer(row[1], np.uint8)[: len(target)]
            missing.append(np.array([index for index, row in enumerate(found) if row is None], np.int64))
        return missing

    def write(self, changed: Sequence[Records], deleted: Mapping[str, tuple[Int64, Int64]], sequence: int) -> None:
        self.step()
        assert sequence >= self.kept.sequence
        self.kept.sequence = sequence
        for table, (ids, positions) in deleted.items():
            for key in self._keys(ids, positions):
                self.step()
                with self._changing:
                    self._rows(table).pop(key, None)
        for records in changed:
            rows = self._rows(records.table)
            assert records.rows.shape == (len(records.ids), self.kept.tables[records.table].record_bytes)
            keys = self._keys(records.ids, records.positions)
            for key, row_id, row in zip(keys, records.ids.tolist(), records.rows, strict=True):
                self.step()
                with self._changing:
                    rows[key] = row_id, row.tobytes()

    def scan(self, table: str, block_rows: int = 65_536, width: int | None = None) -> Iterator[Records]:
        found = [(row_id, key if self._keeps_positions else -1) for key, (row_id, _) in self._rows(table).items()]
        for start in range(0, len(found), block_rows):
            ids, positions = np.array(found[start : start + block_rows], np.int64).T.copy()
            rows = np.empty((len(ids), self.kept.tables[table].record_bytes if width is None else width), np.uint8)
            records = Records(table, ids, positions, rows)
            self.read([records])
            yield records

    def state(self) -> bytes | None:
        return self.kept.state

    def put_state(self, state: bytes) -> None:
        self.step()
        self.kept.state = state

    def close(self) -> None:
        pass

    def _keys(self, ids: Int64, positions: Int64) -> list[int]:
        keys: list[int] = (positions if self._keeps_positions else ids).tolist()
        return keys

    def _rows(self, table: str) -> dict[int, tuple[int, bytes]]:
        if table not in self.kept.rows:
            raise TableNotFound(f"there is no table {table!r}")
        return self.kept.rows[table]
