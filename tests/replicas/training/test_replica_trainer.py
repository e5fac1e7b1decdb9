"""Checkpoints of training over replicas: whole tensors, loadable at any number of replicas and whatever they share."""

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.composite.locations import LocationSettings
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import CheckpointError, ModelError, Unsupported
from elastable.jobs.options import JobOptions
from elastable.jobs.prepare import prepare_job
from elastable.master.checkpoints.checkpoint import list_checkpoints, open_checkpoint
from elastable.master.checkpoints.storage.checkpoint_locations import newest_checkpoint
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.training.trainer import ReplicaTrainer
from tests.elastable.processes import CLICK_JOB
from tests.replicas.training.models import (
    BOTH,
    STATE,
    WEIGHTS,
    compiled,
    perceptron,
    records,
    same_bits,
    seeded,
    sharded,
)
from tests.untyped import Keyword, Keywords

X, Y = records()


def trainer_of(
    group: ReplicaGroup,
    locations: LocationSettings | None,
    seed: int = 1,
    optimizer: keras.optimizers.Optimizer | None = None,
    make: Callable[..., object] = perceptron,
) -> ReplicaTrainer:
    return compiled(make, locations, group, optimizer or keras.optimizers.Nadam(0.01), seed=seed)


def dropping() -> keras.Model:
    layers = keras.layers
    scaled = layers.Normalization()
    scaled.adapt(keras.initializers.RandomNormal()((20, 6)))  # another one with another seed
    return keras.Sequential([keras.Input((6,)), scaled, layers.Dense(5, "tanh"), layers.Dropout(0.3), layers.Dense(1)])


def fitted(trainer: ReplicaTrainer, **named: Keyword) -> ReplicaTrainer:
    trainer.fit(X, Y, **{"batch_size": 5, "epochs": 2, "verbose": 0, **named})
    return trainer


def whole(trainer: ReplicaTrainer) -> dict[str, Array]:
    return {key: np.array(tensor) for key, tensor in trainer.whole_tensors()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Array]]:
    """A directory with a checkpoint of three replicas behind one epoch, and what it holds."""
    home = tmp_path_factory.mktemp("checkpoints")

    def work(group: ReplicaGroup) -> dict[str, Array]:
        trainer = fitted(trainer_of(group, BOTH), epochs=1)
        address = trainer.save(home)
        assert address == newest_checkpoint(home)
        assert address.endswith("ckpt-0000000005")  # 22 records in batches of 5
        return whole(trainer)

    return home, run_threads(3, work)[0]


def test_a_checkpoint_is_that_of_unsharded_training(saved: tuple[Path, dict[str, Array]]) -> None:
    home, tensors = saved
    found = open_checkpoint(home)
    dense = found.dense()
    assert list(dense) == sorted(tensors, key=lambda key: list(dense).index(key))
    assert all(dense[key].tobytes() == tensors[key].tobytes() for key in tensors)
    plain = seeded(perceptron)
    optimizer = keras.optimizers.Nadam(0.01)
    optimizer.build(plain.trainable_weights)
    for place, variable in enumerate(optimizer.variables):
        assert dense[f"optimizer/{place:05d}"].shape == tuple(variable.shape), variable.path
    assert [tuple(dense[f"variables/{place:05d}"].shape) for place in range(4)] == [(6, 5), (5,), (5, 1), (1,)]
    assert [listed.damage for listed in list_checkpoints(home, verify=True)] == [""]


@pytest.mark.parametrize(("size", "locations"), [(1, None), (2, STATE), (4, BOTH), (2, WEIGHTS)])
def test_a_checkpoint_loads_with_any_number_of_replicas_and_any_sharding(
    saved: tuple[Path, dict[str, Array]], size: int, locations: LocationSettings | None
) -> None:
    home, tensors = saved

    def work(group: ReplicaGroup) -> None:
        trainer = trainer_of(group, locations, seed=2)
        trainer.load(home)
        assert trainer.step == 5
        found = whole(trainer)
        assert list(found) == list(tensors)
        assert same_bits(found.values(), tensors.values())
        assert same_bits(trainer.model.get_weights(), [tensors[f"variables/{place:05d}"] for place in range(4)])

    run_threads(size, work)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("locations", [STATE, BOTH, WEIGHTS], ids=["state", "both", "weights"])
def test_resumed_training_is_bit_identical(tmp_path: Path, locations: LocationSettings) -> None:
    def straight(group: ReplicaGroup) -> dict[str, Array]:
        return whole(fitted(trainer_of(group, locations, make=dropping)))

    def stopped(group: ReplicaGroup) -> dict[str, Array]:
        trainer = trainer_of(group, locations, make=dropping)
        saving = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: trainer.save(tmp_path, keep=1))
        fitted(trainer, epochs=1, callbacks=[saving])
        assert len(list(tmp_path.glob("ckpt-*"))) == 1
        again = trainer_of(group, locations, seed=3, make=dropping)
        again.load(tmp_path)
        fitted(again, initial_epoch=1)
        assert again.save(tmp_path, keep=1).endswith("ckpt-0000000010")
        group.barrier()
        assert len(list(tmp_path.glob("ckpt-*"))) == 1  # of the same training
        return whole(again)

    ((want, _), (found, _)) = run_threads(2, straight), run_threads(2, stopped)
    assert same_bits(found.values(), want.values())


def test_a_truncated_file_is_refused_by_name_on_every_replica(
    saved: tuple[Path, dict[str, Array]], tmp_path: Path
) -> None:
    home, _ = saved
    torn = tmp_path / "ckpt-0000000005"
    torn.mkdir()
    for file in Path(open_checkpoint(home).address).iterdir():
        content = bytearray(file.read_bytes())
        if file.name == "dense.safetensors":
            content[-1] ^= 1
        (torn / file.name).write_bytes(content)

    def work(group: ReplicaGroup) -> None:
        trainer = trainer_of(group, STATE)
        before = whole(trainer)
        with pytest.raises(CheckpointError, match=r"dense\.safetensors: its bytes are not the ones that were written"):
            trainer.load(tmp_path)
        with pytest.raises(CheckpointError, match="no checkpoint there"):
            trainer.load(tmp_path / "nowhere")
        assert same_bits(whole(trainer).values(), before.values())

    run_threads(2, work)


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(saved: tuple[Path, dict[str, Array]]) -> None:
    home, _ = saved

    def work(group: ReplicaGroup) -> None:
        fewer = trainer_of(group, STATE, optimizer=keras.optimizers.SGD(0.1))
        with pytest.raises(CheckpointError, match=r"has optimizer/0000\d .* of another model or optimizer"):
            fewer.load(home)
        more = trainer_of(group, STATE, optimizer=keras.optimizers.Adam(0.1, amsgrad=True))
        with pytest.raises(CheckpointError, match=r"optimizer/\d+ .*the checkpoint lacks|lacks optimizer/|is float32"):
            more.load(home)
        wide = keras.Sequential([keras.Input((6,)), keras.layers.Dense(7), keras.layers.Dense(1)])
        other = ReplicaTrainer(wide, BOTH, group)
        other.compile(keras.optimizers.Nadam(0.1), "mse")
        with pytest.raises(
            CheckpointError, match=r"variables/00000 .* is float32 \[6, 5\] in the checkpoint and .*7\]"
        ):
            other.load(home)

    run_threads(2, work)


def test_a_checkpoint_that_cannot_be_written_fails_on_every_replica(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    def work(group: ReplicaGroup) -> None:
        trainer = trainer_of(group, STATE)
        with pytest.raises(CheckpointError, match="cannot be written"):
            trainer.save(tmp_path / "file")
        lazy = ReplicaTrainer(keras.Sequential([keras.layers.Dense(1)]), None, group)
        lazy.compile("adam", "mse")
        with pytest.raises(ModelError, match="is not built"):
            lazy.save(tmp_path)

    run_threads(2, work)


def test_sharding_over_replicas_together_with_a_master_is_refused() -> None:
    model = keras.Sequential([keras.Input((1,), dtype="int64"), et.Embedding(100, 4), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    data = (np.zeros((4, 1), np.int64), np.zeros((4, 1, 1), np.float32))
    with pytest.raises(Unsupported, match=r"optimizer_state: .* the replicas of et.ReplicaTrainer"):
        et.fit(model, data, locations=LocationSettings(optimizer_state=sharded()), verbose=False)


def test_a_location_file_that_shards_is_refused_by_a_job_of_async_pushes(tmp_path: Path) -> None:
    locations = tmp_path / "locations.toml"
    locations.write_text("[optimizer_state]\nreplicated_tensor_sharding = true\n")
    options: Keywords = {"model_file": CLICK_JOB, "locations": locations}
    with pytest.raises(Unsupported, match=r"optimizer_state: .* together with async push: .* by itself"):
        prepare_job(JobOptions(**options, mode="async"))
    with pytest.raises(Unsupported, match="the master of a job holds its tables and dense variables once"):
        prepare_job(JobOptions(**options))
