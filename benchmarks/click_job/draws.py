"""The records of the click model, the same for all contenders: pure functions of their arguments. NumPy only."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from benchmarks.click_job.sizes import BATCH, FEATURES

RECORDS = 64 * BATCH
"""Different records, drawn beforehand; their batches are used in turn."""

IDS = ("uniform", "zipf", "cold")
"""How ids are drawn: uniform over the table; the k-th most frequent with a probability in proportion to k ** -1.05; or
every row of the table once before any comes again, so that each row is cold."""

_SKEW = 1.05


@lru_cache(maxsize=1)
def batches(
    rows: int, kind: str = "uniform", batch: int = BATCH
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Ids int64 `[pool, batch, FEATURES]` below `rows`, and clicks float32 `[pool, batch, 1]`; `RECORDS` records.

    Args:
        rows: Of all tables together, or of each.
        kind: One of `IDS`.
        batch: Records of a batch, of which `RECORDS` is a multiple.
    """
    random = np.random.default_rng(2026)
    shape = (RECORDS // batch, batch, FEATURES)
    if kind == "uniform":
        ids = random.integers(0, rows, shape, dtype=np.int64)
    elif kind == "zipf":
        shares = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -_SKEW)
        ranks = np.searchsorted(shares, random.random(shape) * shares[-1])
        ids = random.permutation(rows)[ranks]  # frequent rows are no neighbours
    else:
        count = RECORDS * FEATURES
        ids = np.concatenate([random.permutation(rows) for _ in range(-(-count // rows))])[:count].reshape(shape)
    return ids, random.integers(0, 2, (*shape[:2], 1)).astype(np.float32)
