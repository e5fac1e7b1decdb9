"""Which of how many store servers a server is: its tables know, and whoever claims it says so."""

from __future__ import annotations

from collections.abc import Mapping

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput

__all__ = ["position_of", "refuse_other_position"]

_NAMED = 3  # tables in a message


def position_of(spec: TableSpec) -> tuple[int, int] | None:
    """Number of the server that holds this shard of a table, and how many there are; None: it was not split by id."""
    origin, whole = spec.origin, spec.origin.table
    if whole is None or origin.id_stride != whole.origin.id_stride * origin.shards:
        return None
    return (origin.id_offset - whole.origin.id_offset) // whole.origin.id_stride, origin.shards


def refuse_other_position(specs: Mapping[str, TableSpec], number: int, servers: int) -> None:
    """Refuses a claim of this server as another one than its tables say.

    Args:
        specs: The server's tables.
        number: As which server it is claimed, counted from 0.
        servers: Of how many; 0: the claim does not say.

    Raises:
        BadInput: it is another server, or there is no such number.
    """
    if not 0 <= number < max(servers, 1):
        raise BadInput(f"a claim as store server {number} of {servers}: they are numbered from 0")
    if not servers:
        return
    others = {
        name: found for name, spec in specs.items() if (found := position_of(spec)) not in (None, (number, servers))
    }
    if others:
        held, of = next(iter(others.values())) or (0, 0)
        names = ", ".join(sorted(others)[:_NAMED])
        raise BadInput(
            f"it is store server {held} of {of} by its tables ({names}), and is named as number {number} of {servers}: "
            "the order and the number of servers are part of the tables. Write --stores in the order of before; "
            "elastable store rescale moves rows to another number of servers"
        )
