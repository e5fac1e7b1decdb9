"""The order of test modules: the dearest first, or random with `--random-order`."""

import random
from collections.abc import Hashable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: The longest first (`make test ARGS=--durations=0` tells). The quick run skips them, and does not import them.
_DEAREST = """
    keras_table/test_keras_table pages/test_pages wheel/test_wheel equality/test_store_servers
    equality/test_same_numbers chaos/test_chaos fuzz/test_fuzz elastable/in_process/test_model_fit
    elastable/callbacks/test_freezing elastable/callbacks/test_best_weights embedding_store/tiers/test_tier_contract
    replicas/knowledge_graphs/test_all_scores elastable/in_process/test_fit_streams
    elastable/in_process/test_steps_in_turn pages/test_site elastable/models/test_saving
    equality/test_store_server_faults elastable/launch/test_replicas elastable/commands/test_train
    embedding_store/tiers/redis/test_redis_sentinel elastable/in_process/test_fit_every_row
    replicas/training/test_trainer embedding_store/tiers/redis/test_redis_failures
    embedding_store/shards/test_rescaling elastable/in_process/test_table_optimizers
    elastable/callbacks/test_moving_averages replicas/knowledge_graphs/test_trainer replicas/processes/test_mpi
    programs/test_programs worker/user_model/test_export master/checkpoints/test_crash_points
    worker/layers/test_distributed_embedding elastable/jobs/test_workers test_plugins consistency/test_protocol
    pages/test_notebooks replicas/training/test_replica_trainer replicas/host_embeddings/test_embedding
    embedding_store/composite/test_partitioned elastable/jobs/test_restarts elastable/in_process/test_loss_reductions
    embedding_store/optimizers/test_dense_replay elastable/jobs/test_redis_job master/checkpoints/test_saved_by_servers
    elastable/jobs/test_killed_master master/core/test_core elastable/jobs/test_interrupted
    replicas/training/test_optimizer embedding_store/composite/test_partitioned_failures
    embedding_store/wire/test_remote elastable/models/test_exporting
    worker/runtime/test_loop elastable/in_process/test_places elastable/in_process/test_on_batch
    embedding_store/engine/test_tiered_store embedding_store/log/test_cut_appenders
    embedding_store/engine/tiered/test_tiered_contract worker/step/test_train_step elastable/jobs/test_evaluation_beside
    elastable/callbacks/test_callback_state embedding_store/wire/test_shared_processes
    elastable/in_process/test_optimizer_arguments elastable/in_process/test_own_train_step
    worker/readers/test_ragged_readers benchmarks/test_sessions embedding_store/optimizers/test_vectorised_kernels
    elastable/jobs/resuming/test_partial_loss test_architecture embedding_store/engine/test_dense_replay
    elastable/in_process/test_table_dtypes elastable/commands/test_kg embedding_store/native/test_kernels
    master/core/test_unlogged_versions examples/test_flights elastable/callbacks/test_best_weights_job
    embedding_store/tiers/redis/test_redis_tier_fencing embedding_store/tiers/test_file_tier examples/test_replicas
    elastable/commands/test_command benchmarks/test_peers
    embedding_store/engine/test_pins_any_history embedding_store/composite/test_partitioned_equality
    examples/test_small_examples embedding_store/test_warm elastable/launch/test_host_embedding_replicas
    embedding_store/engine/test_hostile_commits elastable/output/test_run_directory
    elastable/jobs/test_ragged_stream_job master/commits/test_numbers_at_servers master/rpc/test_lost_answers
    embedding_store/wire/test_dying_server embedding_store/composite/test_lost_shard
    embedding_store/wire/test_call_guard embedding_store/wire/test_rpc_errors
    embedding_store/engine/test_store_history master/core/test_logged_behind
    master/core/test_exactly_once master/core/test_concurrent_evaluation
    embedding_store/engine/tiered/test_framed_reads master/model/test_keras_optimizer master/commits/test_version_record
    embedding_store/wire/test_shared_source embedding_store/engine/test_races master/core/test_staleness
    test_loaded_code master/core/test_exactly_once_at_servers
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
