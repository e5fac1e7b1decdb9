"""A job whose callbacks freeze a part of the model in the second and third epoch, and halve all weights in the end."""

import keras
import numpy as np

import elastable as et
from elastable.embedding_store.contract.arrays import Array

ROWS, EPOCHS, BATCH = 40, 5, 16


class Freeze(keras.callbacks.Callback):
    """Sets `trainable` where Keras reads it anew."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if epoch in (1, 3):
            for name in ("words", "norm", "low"):
                self.model.get_layer(name).trainable = epoch == 3
            self.model.make_train_function(force=True)


class Halve(keras.callbacks.Callback):
    """Halves the weights before the last epoch, and again once all is trained."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if epoch == EPOCHS - 1:
            self.model.set_weights([0.5 * weight for weight in self.model.get_weights()])

    def on_train_end(self, logs: dict[str, float] | None = None) -> None:
        for weight in self.model.weights:
            weight.assign(0.5 * weight)


def model() -> keras.Model:
    words = keras.Input((3,), dtype="int64")
    rows = et.Embedding(ROWS, 4, name="words", embeddings_initializer="ones")(words)
    low = keras.layers.Dense(4, name="low", kernel_initializer=keras.initializers.GlorotUniform(seed=1))
    norm = keras.layers.BatchNormalization(name="norm")
    out = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=2))
    made = keras.Model(words, out(norm(low(keras.layers.Flatten()(rows)))))
    made.compile(keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.1), "mse")
    return made


def data(split: str) -> tuple[Array, Array]:
    random = np.random.default_rng(0 if split == "train" else 1)
    words = random.integers(0, ROWS, (64, 3))
    return words, (words.sum(axis=1) % 2).astype("float32")[:, None]


def callbacks() -> list[object]:
    return [Freeze(), Halve()]
