"""A model file over CSV and Parquet as they come: ids with leading zeros, and integers that became floats."""

import os
from pathlib import Path

import keras

import elastable as et

HOME = "COLUMNS_JOB_HOME"
"""Environment variable that names the folder of the files."""


def model() -> keras.Model:
    """A model of a string, an integer and a number; other columns of the files are none of its business."""
    code, item = keras.Input((), dtype="string", name="code"), keras.Input((), dtype="int64", name="item")
    price = keras.Input((), name="price")
    rows = [et.Embedding(None, 4, name="codes")(code), et.Embedding(None, 4, name="items")(item)]
    together = keras.layers.Concatenate()([*rows, keras.layers.Reshape((1,))(price)])
    made = keras.Model([code, item, price], keras.layers.Dense(1)(together))
    made.compile("sgd", "mse")
    return made


def data(split: str) -> et.Reader:
    """CSV to train on, Parquet to evaluate."""
    home = Path(os.environ[HOME])
    if split == "train":
        return et.CsvReader(home / "train.csv", label="y", fill_null={"item": 0})
    return et.ParquetReader(home / "validation.parquet", label="y")
