"""FBGEMM's table-batched embeddings on the CPU (`SplitTableBatchedEmbeddingBagsCodegen`), row-wise Adagrad fused."""

from collections import deque
from collections.abc import Callable, Mapping
from importlib.metadata import version
from itertools import cycle

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn

_KEPT = 4  # outputs alive at once, so that none is still in a cache


def prepare(race: str, settings: Mapping[str, object]) -> Turn:
    """`lookup`: a bag for each id. `bags`: sums of bags. `update`: forward and backward, which updates."""
    torch.set_num_threads(workloads.THREADS)
    batches = {"lookup": workloads.uniform, "bags": workloads.bags, "update": workloads.zipf}[race]()
    bag = batches[0].size // len(batches[0])
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(workloads.ROWS, workloads.DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        eps=1e-7,
        pooling_mode=PoolingMode.SUM,
    )
    table.init_embedding_weights_uniform(-0.05, 0.05)  # memory never written reads one page of zeros, from the cache
    offsets = torch.arange(0, batches[0].size + 1, bag)
    turns = cycle([torch.from_numpy(np.ascontiguousarray(ids.reshape(-1))) for ids in batches])
    outputs: deque[object] = deque(maxlen=_KEPT)
    gradient = torch.randn(len(batches[0]), workloads.DIM)

    def look_up() -> None:
        with torch.no_grad():
            outputs.append(table(next(turns), offsets))

    def train() -> None:
        table(next(turns), offsets).backward(gradient)

    work: Callable[[], None] = train if race == "update" else look_up
    return Turn(f"fbgemm_gpu-cpu {version('fbgemm_gpu-cpu')}", work, batches[0].size)
