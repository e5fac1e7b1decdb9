"""What is kept of a table besides its rows."""

from __future__ import annotations

from dataclasses import dataclass

from elastable.embedding_store.contract.row_data import TableState
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.membership.stored_touches import StoredTouches

__all__ = ["KeptTable"]


@dataclass(frozen=True, slots=True)
class KeptTable:
    """What the state of a store says of one table, besides its rows.

    Attributes:
        spec: The table.
        stored: Its name in the tier.
        direct: Whether row i lies at position i.
        state: Its `TableState`.
        steps: `TableSteps.save` of a table whose rows follow steps.
        touched: How to read what records say of touches.
        rows: How many the table has.
    """

    spec: TableSpec
    stored: str
    direct: bool
    state: TableState
    steps: bytes | None
    touched: StoredTouches
    rows: int
