"""Keras callbacks in `et.fit`: those that are honoured, and those that are refused by name."""

import time
from collections.abc import Callable

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.errors import Unsupported
from tests.elastable.small_models import assert_same, clicks, plain_model, store_model
from tests.untyped import Keyword

RECORDS = clicks(64)
VERSIONS = 4  # to an epoch of 64 records


def expect_numbers_of_keras(callback: Callable[[keras.Model], object], epochs: int) -> None:
    """Trains the model here and in plain Keras, each with its own callback."""
    ours, theirs = store_model(), plain_model()
    trained(epochs, callback(ours), model=ours, shuffle=False)
    theirs.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    theirs.fit(*RECORDS, epochs=epochs, batch_size=16, callbacks=[callback(theirs)], shuffle=False, verbose=0)
    assert_same(ours, theirs, rtol=1e-4, atol=1e-6)


class Counted(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.logs: list[dict[str, float]] = []

    def on_train_begin(self, logs: dict[str, float] | None = None) -> None:
        self.seen.append("begin")

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        self.seen.append("end")

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.seen.append(f"epoch {epoch}")

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        assert logs is not None
        self.seen.append(f"/epoch {epoch}")
        self.logs.append(dict(logs))

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        assert logs is not None
        assert np.isfinite(logs["loss"])
        self.seen.append(f"batch {batch} after {int(self.model.optimizer.iterations)}")


class TestHonoured:
    def test_epochs_and_versions_are_counted(self) -> None:
        counted = Counted()
        history = trained(2, counted, validation_data=RECORDS)
        assert counted.seen == [
            "begin",
            *(["epoch 0", *(f"batch {batch} after {batch + 1}" for batch in range(4)), "/epoch 0"]),
            *(["epoch 1", *(f"batch {batch} after {batch + 5}" for batch in range(4)), "/epoch 1"]),
            "end",
        ]
        assert set(counted.logs[0]) == {"loss", "val_loss"}
        assert [logs["loss"] for logs in counted.logs] == history.history["loss"]
        assert history.epoch == [0, 1]

    def test_weights_that_a_callback_sets_are_trained_on(self) -> None:
        def half(model: keras.Model) -> object:
            def set_weights(*_: object) -> None:
                model.layers[-1].set_weights([values / 2 for values in model.layers[-1].get_weights()])

            return keras.callbacks.LambdaCallback(on_epoch_begin=set_weights, on_epoch_end=set_weights)

        expect_numbers_of_keras(half, epochs=3)

    def test_what_a_callback_sets_before_and_after_each_batch_is_trained_with(self) -> None:
        reported: list[list[str]] = []

        def warmed(model: keras.Model) -> object:
            dense = model.layers[-1]
            seen: list[str] = []
            reported.append(seen)

            def begin(batch: int, logs: object) -> None:
                seen.append(f"batch {batch}")
                model.optimizer.learning_rate = 0.1 * (batch + 1)
                dense.bias.assign(dense.bias + 0.5)

            def end(batch: int, logs: object) -> None:
                seen.append(f"/batch {batch}")
                dense.kernel.assign(dense.kernel * 0.5)

            return keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, _: seen.append(f"epoch {epoch}"),
                on_train_batch_begin=begin,
                on_train_batch_end=end,
            )

        expect_numbers_of_keras(warmed, epochs=2)
        assert reported[0] == reported[1]

    def test_a_batch_that_asks_to_stop_when_it_begins_is_the_last(self) -> None:
        model = store_model()

        def stop(batch: int, logs: object) -> None:
            model.stop_training = batch == 1

        trained(2, keras.callbacks.LambdaCallback(on_train_batch_begin=stop), model=model)
        assert int(model.optimizer.iterations) == 2

    def test_rows_that_a_callback_writes_after_a_batch_are_trained_on(self) -> None:
        def halved(model: keras.Model) -> object:
            def halve(batch: int, logs: object) -> None:
                table = model.get_layer("users").embeddings
                time.sleep(0.02)  # a lookup ahead would be done by now
                table.assign(np.asarray(table) * 0.5)

            return keras.callbacks.LambdaCallback(on_train_batch_end=halve)

        expect_numbers_of_keras(halved, epochs=2)

    def test_hooks_of_evaluation_are_said_not_to_be_called(self, caplog: pytest.LogCaptureFixture) -> None:
        class Tests(keras.callbacks.Callback):
            def on_test_end(self, logs: dict[str, float] | None = None) -> None:
                raise AssertionError

        trained(1, Tests(), keras.callbacks.ProgbarLogger())
        assert "on_test_end" not in caplog.text
        trained(2, Tests(), keras.callbacks.ProgbarLogger(), validation_data=RECORDS)
        assert caplog.text.count("Tests: the validation data is evaluated by workers, without on_test_end") == 1
        assert "ProgbarLogger" not in caplog.text

    def test_what_a_callback_raises_comes_out(self) -> None:
        def fail(*_: object) -> None:
            raise LookupError("in a callback")

        with pytest.raises(LookupError, match="in a callback"):
            trained(2, keras.callbacks.LambdaCallback(on_epoch_end=fail))


class TestRefused:
    @pytest.mark.parametrize(
        ("callback", "message"),
        [
            (lambda: keras.callbacks.SwapEMAWeights(), "SwapEMAWeights"),
            (lambda: print, "builtin_function_or_method: not a keras.callbacks.Callback"),
        ],
    )
    def test_by_name(self, callback: Callable[..., object], message: str) -> None:
        with pytest.raises(Unsupported, match=message):
            trained(1, callback())


def trained(
    epochs: int, *callbacks: object, model: keras.Model | None = None, **more: Keyword
) -> keras.callbacks.History:
    model = model or store_model()
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    return et.fit(model, RECORDS, epochs=epochs, batch_size=16, callbacks=callbacks, verbose=False, **more)
