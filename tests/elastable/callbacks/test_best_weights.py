"""Callbacks that keep weights and put them back, in `et.fit`: as in plain Keras."""

from pathlib import Path

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.errors import BadInput, Unsupported
from tests.elastable.small_models import assert_same, clicks, plain_model, store_model
from tests.untyped import Keyword, Keywords

RECORDS, HELD_OUT = clicks(64), clicks(32, seed=9)
OPTIMIZERS = {
    "decay": lambda: keras.optimizers.SGD(2.0, momentum=0.9, weight_decay=0.05),
    "sgd": lambda: keras.optimizers.SGD(2.0, momentum=0.9),
}


def fit(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer | None,
    *callbacks: object,
    epochs: int = 6,
    lazy: bool = False,
    **more: Keyword,
) -> keras.callbacks.History:
    """The history; by `et.fit` where the model has tables in a store."""
    if optimizer is not None:
        model.compile(optimizer, "binary_crossentropy")
    settings = {"epochs": epochs, "batch_size": 16, "shuffle": False, "callbacks": list(callbacks), **more}
    if any(isinstance(layer, et.Embedding) for layer in model.layers) or "offload_embeddings_above" in more:
        return et.fit(model, RECORDS, validation_data=HELD_OUT, lazy=lazy, verbose=False, **settings)
    return model.fit(*RECORDS, validation_data=HELD_OUT, verbose=0, **settings)


def assert_equal(ours: keras.Model, theirs: keras.Model, rtol: float = 1e-3, atol: float = 1e-5) -> None:
    assert_same(ours, theirs, rtol, atol)


class TestEarlyStopping:
    @pytest.mark.sampled(6)
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("patience", [1, 20])
    def test_the_best_rows_are_put_back(self, name: str, patience: int) -> None:
        models, best = [store_model(), plain_model()], []
        for model in models:
            mode = "min" if patience == 1 else "max"  # what is best early on, and training goes on
            stopping = keras.callbacks.EarlyStopping("val_loss", 0, patience, mode=mode, restore_best_weights=True)
            history = fit(model, OPTIMIZERS[name](), stopping)
            best.append((stopping.best_epoch, len(history.epoch)))
        assert best[0] == best[1]
        assert best[0][0] < best[0][1] - 1  # the last epoch is not the best
        assert_equal(*models)
        # Training goes on from there, with the slots of the last version.
        for model in models:
            fit(model, None, epochs=1)
        assert_equal(*models)

    def test_ids_that_were_first_trained_later_are_new_again(self) -> None:
        class Worse(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
                assert logs is not None
                logs["judged"] = float(epoch)

        ids = np.arange(32)[:, None]
        model = keras.Sequential([keras.Input((1,), dtype="int64"), et.Embedding(None, 2, name="any"),
                                  keras.layers.Flatten(), keras.layers.Dense(1)])  # fmt: skip
        before = model.layers[0].read_rows(np.arange(32))
        model.compile("sgd", "mse")
        stopping = keras.callbacks.EarlyStopping("judged", mode="min", restore_best_weights=True)
        labels = np.ones((32, 1), np.float32)
        weights = np.concatenate([np.ones(16), np.zeros(16)]).astype(np.float32)
        freeze = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: None)
        et.fit(model, (ids[:16], labels[:16]), verbose=False)
        store = model.layers[0].source
        assert store.row_count("any") == 16
        settings: Keywords = {"epochs": 3, "batch_size": 8, "callbacks": [Worse(), stopping, freeze]}
        et.fit(model, (ids, labels, weights), **settings, shuffle=False, verbose=False)
        np.testing.assert_array_equal(model.layers[0].read_rows(np.arange(16, 32)), before[16:])
        assert np.abs(model.layers[0].read_rows(np.arange(16)) - before[:16]).max() > 0

    def test_of_several_the_last_one_counts(self) -> None:
        models = [store_model(), plain_model()]
        for model in models:
            worst = keras.callbacks.EarlyStopping("val_loss", mode="max", patience=20, restore_best_weights=True)
            best = keras.callbacks.EarlyStopping("val_loss", patience=20, restore_best_weights=True)
            fit(model, OPTIMIZERS["sgd"](), best, worst)
        assert_equal(*models)


class Crash(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if epoch == 3:
            raise LookupError("pulled the plug")


class TestBackupAndRestore:
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_a_fit_that_broke_off_goes_on(self, name: str, tmp_path: Path) -> None:
        whole, broken, theirs = store_model(), store_model(), plain_model()
        fit(whole, OPTIMIZERS[name]())
        fit(theirs, OPTIMIZERS[name]())
        with pytest.raises(LookupError):
            fit(broken, OPTIMIZERS[name](), keras.callbacks.BackupAndRestore(tmp_path / "backup"), Crash())
        again = store_model()
        history = fit(again, OPTIMIZERS[name](), keras.callbacks.BackupAndRestore(tmp_path / "backup"))
        assert history.epoch == [3, 4, 5]
        assert not (tmp_path / "backup").exists()
        assert_equal(again, whole, rtol=1e-6, atol=1e-7)
        assert_equal(again, theirs)
        fit(again, None, epochs=1)
        fit(whole, None, epochs=1)
        assert_equal(again, whole, rtol=1e-5, atol=1e-6)

    def test_offloaded_tables_with_slots_are_refused(self, tmp_path: Path) -> None:
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        with pytest.raises(Unsupported, match=r"'words' is offloaded.*use et\.Embedding"):
            fit(plain_model(), OPTIMIZERS["sgd"](), backup, offload_embeddings_above=1)

    def test_what_is_no_backup_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "training_metadata.json").write_text('{"epoch": "3"}')
        with pytest.raises(BadInput, match="is no backup"):
            fit(store_model(), OPTIMIZERS["sgd"](), keras.callbacks.BackupAndRestore(tmp_path))
