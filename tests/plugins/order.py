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

#: Modules of six seconds and more, the longest first (`make test ARGS=--durations=0` tells). The quick run skips them.
DEAREST = (
    "tests/wheel/test_wheel.py",
    "tests/fuzz/test_fuzz.py",
    "tests/chaos/test_chaos.py",
    "tests/pages/test_pages.py",
    "tests/keras_table/test_keras_table.py",
    "tests/equality/test_same_numbers.py",
    "tests/embedding_store/engine/test_hostile_commits.py",
    "tests/elastable/in_process/test_model_fit.py",
    "tests/embedding_store/composite/test_partitioned.py",
    "tests/embedding_store/composite/test_partitioned_equality.py",
    "tests/elastable/callbacks/test_freezing.py",
    "tests/elastable/callbacks/test_best_weights.py",
    "tests/elastable/models/test_saving.py",
    "tests/examples/test_replicas.py",
    "tests/examples/test_flights.py",
    "tests/elastable/jobs/test_interrupted.py",
    "tests/elastable/in_process/test_fit_every_row.py",
    "tests/replicas/training/test_trainer.py",
    "tests/elastable/callbacks/test_moving_averages.py",
    "tests/elastable/launch/test_replicas.py",
    "tests/programs/test_programs.py",
    "tests/elastable/in_process/test_table_optimizers.py",
    "tests/embedding_store/tiers/redis/test_redis_failures.py",
    "tests/examples/test_small_examples.py",
    "tests/elastable/models/test_exporting.py",
    "tests/elastable/output/test_run_directory.py",
    "tests/elastable/in_process/test_fit.py",
    "tests/elastable/launch/test_host_embedding_replicas.py",
    "tests/elastable/in_process/test_optimizer_arguments.py",
    "tests/elastable/in_process/test_fit_streams.py",
    "tests/embedding_store/optimizers/test_catch_up.py",
    "tests/elastable/in_process/test_loss_reductions.py",
    "tests/embedding_store/test_warm.py",
    "tests/benchmarks/test_peers.py",
    "tests/worker/runtime/test_restart.py",
    "tests/elastable/jobs/test_evaluation_beside.py",
    "tests/master/checkpoints/test_crash_points.py",
    "tests/elastable/jobs/test_killed_master.py",
    "tests/worker/layers/test_distributed_embedding.py",
    "tests/elastable/callbacks/test_best_weights_job.py",
    "tests/elastable/commands/test_command.py",
    "tests/elastable/in_process/test_places.py",
    "tests/embedding_store/wire/test_shared_processes.py",
    "tests/elastable/jobs/test_ragged_stream_job.py",
    "tests/worker/runtime/test_loop.py",
    "tests/embedding_store/wire/test_remote.py",
    "tests/worker/step/test_train_step.py",
    "tests/elastable/in_process/test_own_train_step.py",
    "tests/elastable/jobs/test_workers.py",
    "tests/elastable/jobs/test_restarts.py",
    "tests/elastable/commands/test_train.py",
    "tests/consistency/test_protocol.py",
    "tests/embedding_store/engine/test_pins_any_history.py",
    "tests/embedding_store/optimizers/test_fused_kernels.py",
    "tests/embedding_store/engine/test_chapters.py",
    "tests/embedding_store/optimizers/test_catch_up_kernels.py",
)


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
