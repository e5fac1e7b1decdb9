"""Methods of Keras are replaced for one thread and one block, whatever other threads do."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np

import elastable as et
from elastable.worker.keras.keras_methods import patched


class Speaker:
    def say(self, word: str) -> str:
        return word


def _louder(plain: Callable[..., object], speaker: Speaker, word: str) -> str:
    return str(plain(speaker, word)).upper()


def test_other_threads_have_the_method_as_it_was() -> None:
    with ThreadPoolExecutor(1) as other, patched(Speaker, "say", _louder):
        assert Speaker().say("a") == "A"
        assert other.submit(Speaker().say, "a").result(60) == "a"
    assert Speaker().say("a") == "a"


def test_nothing_stays_where_two_threads_patch_at_once() -> None:
    plain, begun = Speaker.say, threading.Event()

    def other() -> str:
        begun.set()
        with patched(Speaker, "say", _louder):
            return Speaker().say("b")

    with ThreadPoolExecutor(1) as pool:
        with patched(Speaker, "say", _louder):
            came = pool.submit(other)
            assert begun.wait(60)
        assert came.result(60) == "B"
    assert Speaker.say is plain


def test_blocks_of_two_threads_run_side_by_side() -> None:
    # Replicas in threads exchange rows while each builds its model: a block may wait for another's.
    plain, meeting = Speaker.say, threading.Barrier(2)

    def replica(word: str) -> tuple[str, str]:
        with patched(Speaker, "say", _louder):
            meeting.wait(60)
            outer = Speaker().say(word)
            with patched(Speaker, "say", lambda below, self, said: f"{below(self, said)}!"):
                meeting.wait(60)
                return outer, Speaker().say(word)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(replica, "ab"))
    assert results == [("A", "A!"), ("B", "B!")]
    assert Speaker.say is plain


def test_a_model_that_keras_builds_by_calling_it_on_shapes_begins_with_its_initial_states() -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.rows = et.Embedding(None, 4, name="items")
            self.normal = keras.layers.BatchNormalization()
            self.head = keras.layers.Dense(1)

        def call(self, inputs: keras.KerasTensor, training: bool | None = None) -> keras.KerasTensor:
            return self.head(self.normal(self.rows(inputs["id"]), training=training))

    model = Model()
    model.compile("sgd", "mse")
    ids = {"id": np.arange(8)}
    model.fit(ids, np.ones((8, 1), np.float32), epochs=1, verbose=0, batch_size=8)
    # One batch: the moving variance is its start, 1, and a hundredth of the way to the batch's own.
    np.testing.assert_allclose(model.normal.moving_variance, 0.99, atol=0.001)
