"""The order of test modules: the dearest first, or random with `--random-order`.

`make test` hands modules to processes in this order. A long one that begins last would leave the others idle.
"""

import random
from collections.abc import Hashable, Sequence
from pathlib import Path

import pytest

__all__ = ["DEAREST", "pytest_addoption", "pytest_collection_modifyitems", "shuffled"]

ROOT = Path(__file__).parents[2]

#: Modules of six seconds and more, the longest first (`make test ARGS=--durations=0` tells). The quick run skips them.
DEAREST = (
    "tests/keras_table/test_keras_table.py",
    "tests/pages/test_pages.py",
    "tests/wheel/test_wheel.py",
    "tests/equality/test_store_servers.py",
    "tests/equality/test_same_numbers.py",
    "tests/chaos/test_chaos.py",
    "tests/fuzz/test_fuzz.py",
    "tests/elastable/in_process/test_model_fit.py",
    "tests/elastable/callbacks/test_freezing.py",
    "tests/elastable/callbacks/test_best_weights.py",
    "tests/embedding_store/tiers/test_tier_contract.py",
    "tests/replicas/knowledge_graphs/test_all_scores.py",
    "tests/elastable/in_process/test_fit_streams.py",
    "tests/elastable/in_process/test_steps_in_turn.py",
    "tests/pages/test_site.py",
    "tests/elastable/models/test_saving.py",
    "tests/equality/test_store_server_faults.py",
    "tests/elastable/launch/test_replicas.py",
    "tests/elastable/commands/test_train.py",
    "tests/embedding_store/tiers/redis/test_redis_sentinel.py",
    "tests/elastable/in_process/test_fit_every_row.py",
    "tests/replicas/training/test_trainer.py",
    "tests/embedding_store/tiers/redis/test_redis_failures.py",
    "tests/embedding_store/shards/test_rescaling.py",
    "tests/elastable/in_process/test_table_optimizers.py",
    "tests/elastable/callbacks/test_moving_averages.py",
    "tests/replicas/knowledge_graphs/test_trainer.py",
    "tests/replicas/processes/test_mpi.py",
    "tests/programs/test_programs.py",
    "tests/worker/models/test_export.py",
    "tests/master/checkpoints/test_crash_points.py",
    "tests/worker/layers/test_distributed_embedding.py",
    "tests/elastable/jobs/test_workers.py",
    "tests/test_plugins.py",
    "tests/consistency/test_protocol.py",
    "tests/pages/test_notebooks.py",
    "tests/replicas/training/test_replica_trainer.py",
    "tests/replicas/host_embeddings/test_embedding.py",
    "tests/embedding_store/composite/test_partitioned.py",
    "tests/elastable/jobs/test_restarts.py",
    "tests/elastable/in_process/test_loss_reductions.py",
    "tests/embedding_store/optimizers/test_catch_up.py",
    "tests/elastable/jobs/test_redis_job.py",
    "tests/master/checkpoints/test_saved_by_servers.py",
    "tests/elastable/jobs/test_killed_master.py",
    "tests/master/jobs/test_core.py",
    "tests/elastable/jobs/test_interrupted.py",
    "tests/replicas/training/test_optimizer.py",
    "tests/embedding_store/composite/test_partitioned_failures.py",
    "tests/embedding_store/wire/test_remote.py",
    "tests/elastable/in_process/test_fit.py",
    "tests/elastable/models/test_exporting.py",
    "tests/worker/runtime/test_loop.py",
    "tests/elastable/in_process/test_places.py",
    "tests/elastable/in_process/test_on_batch.py",
    "tests/embedding_store/engine/test_tiered_store.py",
    "tests/embedding_store/log/test_cut_appenders.py",
    "tests/embedding_store/engine/test_stores_in_redis.py",
    "tests/worker/step/test_train_step.py",
    "tests/elastable/jobs/test_evaluation_beside.py",
    "tests/elastable/callbacks/test_callback_state.py",
    "tests/embedding_store/wire/test_shared_processes.py",
    "tests/elastable/in_process/test_optimizer_arguments.py",
    "tests/elastable/in_process/test_own_train_step.py",
    "tests/worker/readers/test_ragged_readers.py",
    "tests/benchmarks/test_sessions.py",
    "tests/embedding_store/optimizers/test_fused_kernels.py",
    "tests/elastable/jobs/resuming/test_partial_loss.py",
    "tests/test_architecture.py",
    "tests/embedding_store/engine/test_replay_epochs.py",
    "tests/elastable/in_process/test_table_dtypes.py",
    "tests/elastable/commands/test_kg.py",
    "tests/embedding_store/native/test_kernel_cache.py",
    "tests/master/jobs/test_unlogged_versions.py",
    "tests/examples/test_flights.py",
    "tests/elastable/callbacks/test_best_weights_job.py",
    "tests/embedding_store/tiers/redis/test_redis_tier_fencing.py",
    "tests/embedding_store/tiers/test_file_tier.py",
    "tests/examples/test_replicas.py",
    "tests/elastable/commands/test_command.py",
    "tests/benchmarks/test_peers.py",
    "tests/embedding_store/optimizers/test_catch_up_kernels.py",
    "tests/embedding_store/engine/test_pins_any_history.py",
    "tests/embedding_store/composite/test_partitioned_equality.py",
    "tests/examples/test_small_examples.py",
    "tests/embedding_store/test_warm.py",
    "tests/elastable/launch/test_host_embedding_replicas.py",
    "tests/embedding_store/engine/test_hostile_commits.py",
    "tests/elastable/output/test_run_directory.py",
    "tests/elastable/jobs/test_ragged_stream_job.py",
    "tests/master/commits/test_numbers_at_servers.py",
    "tests/master/wire/test_lost_answers.py",
    "tests/embedding_store/wire/test_dying_server.py",
    "tests/embedding_store/composite/test_lost_shard.py",
    "tests/embedding_store/wire/test_call_guard.py",
    "tests/embedding_store/wire/test_rpc_errors.py",
    "tests/embedding_store/engine/test_store_history.py",
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
