"""Tables that share a budget of rows (`max_rows`) with other stores: others decide what goes of them."""

from __future__ import annotations

from collections.abc import Iterable

from elastable.embedding_store.contract.row_data import Commit
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput

__all__ = ["budgets_due", "require_cuts"]


def budgets_due(specs: Iterable[TableSpec], commit: Commit) -> set[str]:
    """Names of the tables of which others decide what goes for a budget in this commit."""
    return {spec.name for spec in specs if spec.name not in commit.frozen and spec.shares_budget(commit.version)}


def require_cuts(specs: Iterable[TableSpec], commit: Commit) -> None:
    """Raises `BadInput` unless a commit says what goes of exactly those tables whose budget is shared."""
    due = budgets_due(specs, commit)
    if due != set(commit.cuts):
        said, asked = (", ".join(sorted(names)) or "none" for names in (set(commit.cuts), due))
        raise BadInput(
            f"the commit of version {commit.version} says what goes for the max_rows of all shards of tables {said}, "
            f"and has to say so of {asked}: such tables are committed to through all of their store servers (--stores)"
        )
