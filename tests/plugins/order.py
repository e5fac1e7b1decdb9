"""The order of test modules: the dearest first, or random with `--random-order`.

`make test` hands modules to processes in this order. A long one that begins last would leave the others idle.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from pathlib import Path

import pytest

__all__ = ["DEAREST", "pytest_addoption", "pytest_collection_modifyitems", "shuffled"]

ROOT = Path(__file__).parents[2]

#: Modules of ten seconds and more, the longest first (`make test ARGS=--durations=0` tells).
DEAREST: tuple[str, ...] = ()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--random-order`."""
    parser.addoption(
        "--random-order", action="store_true", help="modules, classes and tests in an order that --seed decides"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts modules; the order within each stays, unless it is to be random."""
    if config.option.random_order:
        items[:] = shuffled(items, random.Random(str(config.option.seed).rpartition(" ")[2]))
        return
    rank = {name: number for number, name in enumerate(DEAREST)}
    items.sort(key=lambda item: rank.get(item.nodeid.split("::")[0], len(rank)))


def shuffled(items: Sequence[pytest.Item], chance: random.Random) -> list[pytest.Item]:
    """Modules, classes within a module, and tests within a class, each in random order, so that fixtures are shared."""

    def shuffle(group: Sequence[pytest.Item], depth: int) -> list[pytest.Item]:
        parts: dict[Hashable, list[pytest.Item]] = {}
        for item in group:
            parts.setdefault(tuple(item.nodeid.split("::")[:depth]), []).append(item)
        mixed = list(parts.values())
        chance.shuffle(mixed)
        return [item for part in mixed for item in (shuffle(part, depth + 1) if len(part) > 1 else part)]

    return shuffle(items, 1)
