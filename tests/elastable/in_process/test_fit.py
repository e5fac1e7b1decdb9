"""`et.fit` against plain Keras on the same records, and what of `compile()` it honours."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from tests.elastable.small_models import clicks, plain_model, store_model, tables_and_weights
from tests.untyped import Keyword

BATCH = 16


class TestAfterwards:
    def test_initial_epoch_goes_on_with_the_next_order(self) -> None:
        records = clicks(BATCH * 4)

        def trained(*epochs: tuple[int, int]) -> keras.Model:
            model = store_model()
            model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy")
            for initial, end in epochs:
                history = et.fit(
                    model, records, epochs=end, initial_epoch=initial, batch_size=BATCH, seed=3, verbose=False
                )
                assert history.epoch == list(range(initial, end))
            return model

        once, twice, same_order = trained((0, 4)), trained((0, 2), (2, 4)), trained((0, 2), (0, 2))
        ours, theirs, others = tables_and_weights(twice), tables_and_weights(once), tables_and_weights(same_order)
        for name, values in theirs.items():
            np.testing.assert_array_equal(ours[name], values, err_msg=name)
            assert not np.array_equal(others[name], values)

    def test_predict_evaluate_save_and_load(self, tmp_path: Path) -> None:
        x, y = clicks(BATCH * 8)
        model = store_model()
        model.compile(keras.optimizers.Adagrad(0.3), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc")])
        history = et.fit(model, (x, y), epochs=5, batch_size=BATCH, validation_data=(x, y), verbose=False)
        assert history.history["val_loss"][-1] < history.history["val_loss"][0]
        metrics = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
        assert metrics["loss"] == pytest.approx(history.history["val_loss"][-1], rel=1e-5)
        assert metrics["auc"] == pytest.approx(history.history["val_auc"][-1], abs=1e-4)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
        et.fit(loaded, (x, y), epochs=1, batch_size=BATCH, verbose=False)
        assert loaded.evaluate(x, y, verbose=0, return_dict=True)["loss"] < metrics["loss"]

    def test_a_dataset_trains_as_its_records_do(self) -> None:
        records, held_out = clicks(BATCH * 4 + 5), clicks(BATCH, seed=1)

        def trained(
            data: object, validation: object, **size: Keyword
        ) -> tuple[dict[str, Array], dict[str, list[float]]]:
            model = store_model()
            model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy")
            history = et.fit(model, data, epochs=2, validation_data=validation, seed=3, verbose=False, **size)
            return tables_and_weights(model), history.history

        train, validation = (tf.data.Dataset.from_tensor_slices(each).batch(BATCH) for each in (records, held_out))
        ours, history = trained(et.StreamReader(train), validation)  # in batches of its own size
        theirs, expected = trained(records, held_out, batch_size=BATCH)
        assert history == expected
        for name, values in theirs.items():
            np.testing.assert_array_equal(ours[name], values, err_msg=name)


class TestModels:
    def test_plain_embeddings_move_to_the_store_and_give_the_same(self) -> None:
        records = clicks(BATCH * 4)
        moved = plain_model()
        moved.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
        # Only the words are large enough: 40 x 4 elements against 30 x 4.
        et.fit(moved, records, epochs=2, batch_size=BATCH, shuffle=False, offload_embeddings_above=130, verbose=False)
        theirs = plain_model()
        theirs.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", run_eagerly=True)
        theirs.fit(*records, epochs=2, batch_size=BATCH, shuffle=False, verbose=0)
        assert moved.get_layer("users").weights
        assert [weight.table_name for weight in moved.get_layer("words").weights] == ["words"]
        x = records[0]
        np.testing.assert_allclose(moved.predict(x, verbose=0), theirs.predict(x, verbose=0), rtol=1e-5)
