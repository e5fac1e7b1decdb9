"""torch's EmbeddingBag, as its users call it."""

from collections import deque
from collections.abc import Mapping
from itertools import cycle

import torch

from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn

_KEPT = 4  # outputs alive at once, so that none is still in a cache


def prepare(race: str, settings: Mapping[str, object]) -> Turn:
    """`lookup`: a bag for each id. `bags`: sums of bags."""
    torch.set_num_threads(workloads.THREADS)
    batches = {"lookup": workloads.uniform, "bags": workloads.bags}[race]()
    table = torch.nn.EmbeddingBag(workloads.ROWS, workloads.DIM, mode="sum")
    turns = cycle([torch.from_numpy(ids.reshape(len(ids), -1)) for ids in batches])
    outputs: deque[object] = deque(maxlen=_KEPT)

    def look_up() -> None:
        with torch.no_grad():
            outputs.append(table(next(turns)))

    return Turn(f"torch {torch.__version__}", look_up, batches[0].size)
