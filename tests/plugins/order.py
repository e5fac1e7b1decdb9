"""The order of test modules: the dearest first, or random with `--random-order`."""

import random
from collections.abc import Hashable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: The longest first (`make test ARGS=--durations=0` tells). The quick run skips them, and does not import them.
_DEAREST = """
    elastable/jobs/engines/test_ray_jobs
    pages/test_pages elastable/in_process/test_model_fit elastable/models/test_saving
    equality/test_same_numbers elastable/in_process/test_fit_every_row elastable/callbacks/test_freezing
    replicas/training/test_trainer equality/test_store_servers elastable/in_process/test_optimizer_arguments
    elastable/commands/test_train elastable/models/test_rows_as_weights worker/runtime/test_loop
    embedding_store/native/test_kernels elastable/in_process/test_table_optimizers
    embedding_store/composite/test_partitioned fuzz/test_fuzz chaos/test_chaos keras_programs/test_drawn
    replicas/training/test_keras_numbers wheel/test_wheel master/checkpoints/test_crash_points
    keras_table/test_keras_table
    elastable/in_process/test_trained_in_turn embedding_store/tiers/redis/test_redis_failures
    elastable/models/test_exporting embedding_store/tiers/test_tier_contract
    embedding_store/engine/tiered/test_tiered_contract embedding_store/log/test_cut_appenders
    elastable/jobs/test_interrupted equality/test_store_server_faults
    elastable/in_process/test_changed_between_fits elastable/models/test_plain_files
    elastable/in_process/test_own_train_step embedding_store/tiers/redis/test_redis_sentinel
    elastable/jobs/resuming/test_partial_loss consistency/test_protocol replicas/host_embeddings/test_embedding
    pages/test_site programs/test_programs embedding_store/optimizers/test_vectorised_kernels
    elastable/in_process/test_fit_streams embedding_store/shards/test_rescaling elastable/commands/test_command
    elastable/callbacks/test_best_weights test_plugins elastable/callbacks/test_callback_state
    worker/layers/test_distributed_embedding replicas/training/test_replica_trainer elastable/launch/test_replicas
    elastable/jobs/test_evaluation_beside elastable/in_process/test_table_dtypes
    elastable/callbacks/test_moving_averages
    embedding_store/tiers/test_file_tier elastable/commands/test_kg embedding_store/engine/test_dense_replay
    backends/test_jobs backends/test_numbers elastable/jobs/resuming/test_continuing
    elastable/serving/test_service elastable/models/test_predictor embedding_store/wire/test_connections
    master/core/test_core benchmarks/test_load worker/step/test_train_step replicas/knowledge_graphs/test_trainer
    elastable/in_process/test_loss_reductions replicas/groups/test_mpi
    elastable/in_process/test_repeated_ids
    embedding_store/wire/test_shared_processes elastable/jobs/test_workers worker/rows/test_model_inputs
    elastable/in_process/test_places embedding_store/engine/test_tiered_store
    elastable/callbacks/test_callback_jobs replicas/knowledge_graphs/test_all_scores
    elastable/in_process/test_on_batch master/core/test_unlogged_versions
    embedding_store/optimizers/test_dense_replay embedding_store/composite/test_partitioned_failures
    examples/test_flights pages/test_notebooks elastable/in_process/test_steps_in_turn
    master/checkpoints/test_saved_by_servers master/commits/test_numbers_at_servers embedding_store/wire/test_remote
    benchmarks/test_sessions embedding_store/tiers/redis/test_redis_tier_fencing
    embedding_store/composite/test_partitioned_equality examples/test_small_examples
    worker/readers/test_ragged_readers embedding_store/test_warm test_architecture
    embedding_store/wire/test_call_guard embedding_store/composite/test_lost_shard
    embedding_store/wire/test_shared_source master/commits/test_version_record
    master/core/test_concurrent_evaluation master/rpc/test_lost_answers embedding_store/engine/test_pins
    embedding_store/engine/test_store_history master/core/test_exactly_once
    embedding_store/engine/tiered/test_framed_reads master/model/test_keras_optimizer
    embedding_store/engine/test_races master/core/test_staleness test_loaded_code
    elastable/in_process/test_kept_traces elastable/monitoring/test_http_server elastable/jobs/resuming/test_given_rows
    elastable/in_process/test_fit_events elastable/jobs/test_stream_jobs
"""
DEAREST = tuple(f"tests/{module}.py" for module in _DEAREST.split())


def pytest_addoption(parser: pytest.Parser) -> None:
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
