"""Keras callbacks in `et.fit`: those that are honoured, and those that are refused by name."""

import time

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.errors import Unsupported
from tests.elastable.small_models import assert_same, clicks, plain_model, store_model
from tests.untyped import Keyword

RECORDS = clicks(64)


def trained(model: keras.Model, epochs: int, *callbacks: object, **more: Keyword) -> None:
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    et.fit(model, RECORDS, epochs=epochs, batch_size=16, callbacks=callbacks, verbose=False, **more)


def test_a_batch_that_asks_to_stop_when_it_begins_is_the_last() -> None:
    model = store_model()

    def stop(batch: int, logs: object) -> None:
        model.stop_training = batch == 1

    trained(model, 2, keras.callbacks.LambdaCallback(on_train_batch_begin=stop))
    assert int(model.optimizer.iterations) == 2


def test_rows_that_a_callback_writes_after_a_batch_are_trained_on() -> None:
    def halved(model: keras.Model) -> object:
        def halve(batch: int, logs: object) -> None:
            table = model.get_layer("users").embeddings
            time.sleep(0.02)  # a lookup ahead would be done by now
            table.assign(np.asarray(table) * 0.5)

        return keras.callbacks.LambdaCallback(on_train_batch_end=halve)

    ours, theirs = store_model(), plain_model()
    trained(ours, 2, halved(ours), shuffle=False)
    theirs.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    theirs.fit(*RECORDS, epochs=2, batch_size=16, callbacks=[halved(theirs)], shuffle=False, verbose=0)
    assert_same(ours, theirs, rtol=1e-4, atol=1e-6)


def test_hooks_of_evaluation_are_said_not_to_be_called(caplog: pytest.LogCaptureFixture) -> None:
    class Tests(keras.callbacks.Callback):
        def on_test_end(self, logs: dict[str, float] | None = None) -> None:
            raise AssertionError

    trained(store_model(), 1, Tests(), keras.callbacks.ProgbarLogger())
    assert "on_test_end" not in caplog.text
    trained(store_model(), 2, Tests(), keras.callbacks.ProgbarLogger(), validation_data=RECORDS)
    assert caplog.text.count("Tests: the validation data is evaluated by workers, without on_test_end") == 1
    assert "ProgbarLogger" not in caplog.text


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"builtin_function_or_method: not a keras\.callbacks\.Callback"):
        trained(store_model(), 1, print)
