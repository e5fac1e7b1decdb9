"""A job whose first epoch counts as the best, and is what it ends with; files in the folder KEPT_IN hold the others."""

import os

import keras
from freezing_job import data, model  # type: ignore[import-not-found]

__all__ = ["callbacks", "data", "model"]


def callbacks() -> list[object]:
    kinds, folder = keras.callbacks, os.environ.get("KEPT_IN", "")
    return [
        kinds.EarlyStopping("loss", mode="max", patience=3, restore_best_weights=True),
        kinds.ModelCheckpoint(folder + "/{epoch}.keras"),
        kinds.ModelCheckpoint(f"{folder}/best.weights.h5", "loss", save_best_only=True, save_weights_only=True),
    ]
