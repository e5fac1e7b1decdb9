"""Places where a tier can be kept: each can be opened again, and some of them by another process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.tier import Records, Tier
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from tests.embedding_store.tiers.dict_tier import DictTier, Kept
from tests.pages.blocks import blocks_of
from tests.untyped import Keyword, Parsed

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


@dataclass(frozen=True)
class Place:
    """An empty place for a tier.

    Attributes:
        program: A Python expression that opens it in another process, and the imports that it needs; None: it is of
            this process alone.
    """

    open: Callable[[], Tier]  # opens it, as often as one likes, one after the other
    program: tuple[str, str] | None = None


def dict_places(home: Path) -> Iterator[Place]:
    while True:
        yield Place(partial(DictTier, Kept()))


def module_places(module: str, tier: str, home: Path, **options: Keyword) -> Iterator[Place]:
    """Folders below `home`, of a tier that is made of one and of options."""
    made = getattr(import_module(module), tier)
    for number in count():
        folder = home / str(number)
        program = f"from {module} import {tier}", f"{tier}({str(folder)!r}, **{options!r})"
        yield Place(partial(made, folder, **options), program)


def page_places(home: Path) -> Iterator[Place]:
    """Databases below `home`, of the tier that `docs/extending.md` writes."""
    code = next(block.text for block in blocks_of(PAGE) if "class SqliteTier" in block.text)
    names: Parsed = {"__name__": "page"}
    exec(compile(code, str(PAGE), "exec"), names)
    for number in count():
        yield Place(partial(names["SqliteTier"], home / f"{number}.db"))


def redis_places(url: str) -> Iterator[Place]:
    for number in count():
        place = f"{url}{'&' if '?' in url else '?'}namespace=place{number}&partitions=8"
        imports = "from elastable.embedding_store.tiers.redis.redis_tier import RedisTier"
        yield Place(partial(RedisTier, place), (imports, f"RedisTier({place!r})"))


def records(table: str, ids: Int64 | list[int], positions: Int64 | list[int], rows: UInt8 | int) -> Records:
    """Records; `rows` may be their width, for reading."""
    if isinstance(rows, int):
        rows = np.full((len(ids), rows), 77, np.uint8)
    return Records(table, np.array(ids, np.int64), np.array(positions, np.int64), np.ascontiguousarray(rows))


def everything(tier: Tier, table: str, block_rows: int = 65_536, width: int | None = None) -> dict[int, bytes]:
    """Rows by id, as a scan gives them: each id once."""
    found = dict[int, bytes]()
    for block in tier.scan(table, block_rows, width):
        assert 0 < len(block.ids) <= block_rows
        assert len(block.ids) == len(block.positions) == len(block.rows)
        for row_id, row in zip(block.ids.tolist(), block.rows, strict=True):
            assert row_id not in found
            found[row_id] = row.tobytes()
    return found
