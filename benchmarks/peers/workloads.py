"""The batches of a comparison, the same for all sides: pure functions of its settings. NumPy only."""

from typing import TypedDict

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

ROWS, DIM, BATCH = 2_000_000, 64, 65_536
BAG = 20
THREADS = 2
_BATCHES = 24  # in rotation, so that no row is still in a cache
_SEED = 2026


class Settings(TypedDict, total=False):
    """What every side of a race receives; a race says what it needs."""

    rows: int
    batch: int
    address: str
    partitions: int
    entities: int
    relations: int
    triples: int
    dim: int
    negatives: int


def _random() -> np.random.Generator:
    return np.random.default_rng(_SEED)


def uniform() -> list[Int64]:
    """Batches of ids, uniform over the table."""
    random = _random()
    return [random.integers(0, ROWS, BATCH) for _ in range(_BATCHES)]


def unique() -> list[Int64]:
    """Batches of ids, uniform over the table, each once in its batch."""
    random = _random()
    return [random.choice(ROWS, BATCH, replace=False).astype(np.int64) for _ in range(_BATCHES)]


def bags() -> list[Int64]:
    """Batches of ids, uniform over the table, int64 `[bags, BAG]`, about `BATCH` ids in all."""
    random = _random()
    return [random.integers(0, ROWS, (BATCH // BAG, BAG)) for _ in range(_BATCHES)]


def dynamic_ids() -> tuple[Int64, list[Int64]]:
    """`ROWS` different ids from all of int64, and batches drawn uniformly from them."""
    random = _random()
    ids = np.unique(random.integers(-(2**63), 2**63 - 1, ROWS + 1000, np.int64))
    ids = random.permutation(ids)[:ROWS]
    return ids, [ids[random.integers(0, ROWS, BATCH)] for _ in range(_BATCHES)]


def zipf(exponent: float = 1.05, batches: int = 0) -> list[Int64]:
    """So many batches (0: as of the others) of ids of which the k-th most frequent has probability ~ k ** -exponent."""
    random = _random()
    shares = np.cumsum(np.arange(1, ROWS + 1, dtype=np.float64) ** -exponent)
    places = random.permutation(ROWS).astype(np.int64)  # frequent rows are no neighbours
    return [places[np.searchsorted(shares, random.random(BATCH) * shares[-1])] for _ in range(batches or _BATCHES)]


def redis_ids(rows: int, batch: int) -> list[Int64]:
    """Batches of ids for a table of so many rows, each once in its batch."""
    random = _random()
    return [random.choice(rows, batch, replace=False).astype(np.int64) for _ in range(_BATCHES)]


def triples(entities: int, relations: int, count: int) -> Int64:
    """Triples of a random graph, int64 `[count, 3]`: head, relation, tail."""
    random = _random()
    columns = [random.integers(0, most, count) for most in (entities, relations, entities)]
    return np.stack(columns, axis=1).astype(np.int64)
