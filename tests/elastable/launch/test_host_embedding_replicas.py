"""Host embeddings in real processes, dense variables by `et.ReplicaTrainer`: the numbers of one plain Keras model."""

from pathlib import Path

import keras
import numpy as np

from tests.elastable.launch.host_embedding_program import BATCH, DIM, RATE, ROWS, X, Y, model_of
from tests.elastable.processes import succeeded


def test_two_processes_train_as_one_plain_keras_model(tmp_path: Path) -> None:
    """Batches of 15 are 8 and 7: the parts differ in size."""
    succeeded("replicas", "-n", "2", "-m", "tests.elastable.launch.host_embedding_program", tmp_path)
    # The regularizer of weight zero makes gradients dense: see `tests.equality.model.plain_model`.
    zero = keras.regularizers.L2(0.0)
    rows = keras.layers.Embedding(ROWS, DIM, embeddings_initializer="ones", embeddings_regularizer=zero)
    plain = model_of(rows)
    plain.compile(keras.optimizers.Adagrad(RATE), "mse")
    plain.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    for rank in range(2):
        with np.load(tmp_path / f"{rank}.npz") as found:
            for strategy in ("TOKEN", "ENCODING"):
                np.testing.assert_allclose(found[strategy], np.asarray(rows.embeddings), rtol=0, atol=1e-6)
                np.testing.assert_allclose(
                    found[f"{strategy} kernel"], np.asarray(plain.layers[-1].kernel), rtol=0, atol=1e-6
                )
            np.testing.assert_array_equal(found["TOKEN"], found["ENCODING"])
