"""Id sets: the unique ids of a batch, and the row index of every position."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import TableNotFound
from elastable.embedding_store.tables.checks import require_ids
from elastable.embedding_store.tables.grouping import unique_ids


@dataclass(frozen=True, slots=True)
class IdSets:
    """All ids of one micro-batch.

    Attributes:
        unique: Table name -> int64 `[u]`, sorted by first appearance.
        inverses: For every planned embedding call, in call order, int32 `[n]`: position i of the call reads row
            `inverses[call][i]` of its table's BET.
        shapes: For every planned call the shape of its ids.
    """

    unique: Mapping[str, Int64]
    inverses: Sequence[npt.NDArray[np.int32]]
    shapes: Sequence[tuple[int, ...]] = ()


def make_id_sets(tables: Sequence[str], calls: Sequence[Int64], specs: Mapping[str, TableSpec]) -> IdSets:
    """One id set per table, over all of its calls.

    Args:
        tables: The table of every planned call, in call order.
        calls: int64 ids of every planned call, of any shape.

    Raises:
        TableNotFound: the store does not contain it, or lost it.
        IdOutOfRange: an id outside a fixed table; names table, id and position.
    """
    unique: dict[str, Int64] = {}
    shapes, flat, by_table = list(map(np.shape, calls)), list(map(np.ravel, calls)), dict[str, list[int]]()
    for call, table in enumerate(tables):
        by_table.setdefault(table, []).append(call)
    inverses: list[npt.NDArray[np.int32]] = [np.zeros(0, np.int32)] * len(calls)
    for table, of_table in by_table.items():
        if table not in specs:
            raise TableNotFound(f"no table {table!r} in the job's store (tables: {', '.join(sorted(specs)) or 'none'})")
        ids = flat[of_table[0]] if len(of_table) == 1 else np.concatenate([flat[call] for call in of_table])
        require_ids(specs[table], ids)
        unique[table], inverse = unique_ids(ids)
        for call in of_table:
            inverses[call], inverse = np.split(inverse, [len(flat[call])])
    return IdSets(unique, inverses, shapes)
