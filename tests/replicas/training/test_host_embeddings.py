"""Host embeddings in a model that trains over replicas: the table and the dense part, together."""

import keras
import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, CheckpointError
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.host_embeddings.host_embedding import create_host_embedding
from elastable.replicas.host_embeddings.host_table import HostEmbeddingOptimizerSpec
from elastable.replicas.training.trainer import ReplicaTrainer
from tests.replicas.training.models import STATE, compiled, same_bits

RANDOM = np.random.default_rng(3)
IDS = RANDOM.integers(0, 20, (12, 2))
Y = RANDOM.normal(size=(12, 1)).astype(np.float32)


def trainer_of(group: ReplicaGroup, table: keras.layers.Layer) -> ReplicaTrainer:
    """A model of one table of 20 rows of 4."""

    def make() -> object:
        ids = keras.Input((2,), dtype="int64")
        return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(table(ids))))

    return compiled(make, STATE, group, keras.optimizers.Adam(0.01))


def test_a_host_embedding_learns_with_the_dense_part_and_is_saved_with_it() -> None:
    def work(group: ReplicaGroup) -> tuple[float, float, Array, Array]:
        spec = HostEmbeddingOptimizerSpec(0.1, "adam")
        table = create_host_embedding("rows", (20, 4), optimizer_spec=spec, initializer="ones", group=group)
        with table.register():
            trainer = trainer_of(group, table)
            before = trainer.evaluate(IDS, Y)
            trainer.fit(IDS, Y, batch_size=4, epochs=3, verbose=0)
            after = trainer.evaluate(IDS, Y)
            saved = {key: np.array(tensor) for key, tensor in trainer.whole_tensors()}
            trainer.fit(IDS, Y, batch_size=4, epochs=5, initial_epoch=4, verbose=0)
            assert not np.array_equal(table.get_embedding_tensor(), saved["host/rows/weights"])
            trainer.restore(saved, 9)
            again = {key: np.array(tensor) for key, tensor in trainer.whole_tensors()}
            assert list(again) == list(saved)
            assert same_bits(again.values(), saved.values())
            if group.size == 1:
                return before, after, np.asarray(trainer.predict(IDS, batch_size=5)), table.get_embedding_tensor()
            with pytest.raises(BadInput, match=r"one has 1 for 2 replicas.*'rows'"):
                trainer.fit(IDS[:5], Y[:5], batch_size=4, verbose=0)
            with pytest.raises(CheckpointError, match=r"has host/other/weights, and the model has no such"):
                trainer.restore({**saved, "host/other/weights": saved["host/rows/weights"]}, 9)
            with pytest.raises(CheckpointError, match=r"another model: .*no 'weights'"):
                trainer.restore({key: value for key, value in saved.items() if key != "host/rows/weights"}, 9)
            return before, after, np.asarray(trainer.predict(IDS, batch_size=5)), table.get_embedding_tensor()

    first, second = run_threads(2, work)
    assert first[1] < first[0]
    assert first[2].shape == (12, 1)
    assert same_bits(first[2:], second[2:])
    ((_, alone, predicted, rows),) = run_threads(1, work)
    assert alone == pytest.approx(first[1], rel=1e-4)
    np.testing.assert_allclose(predicted, first[2], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(rows, first[3], rtol=1e-3, atol=1e-4)
