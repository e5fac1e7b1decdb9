"""How many functions and files of ours a warm `et.fit` passes through, in all threads."""

import keras
import numpy as np

import elastable as et
from tests.test_hops import passed

MOST_FUNCTIONS, MOST_FILES = 600, 100


def test_a_warm_fit_of_eight_steps_passes_few_functions() -> None:
    ids = keras.Input((4,), dtype="int64")
    rows = keras.layers.Flatten()(et.Embedding(1000, 8, name="e")(ids))
    model = keras.Model(ids, keras.layers.Dense(1)(rows))
    model.compile("adagrad", "mse")
    x, y = np.random.default_rng(0).integers(0, 1000, (512, 4)), np.ones((512, 1), np.float32)
    et.fit(model, x, y, batch_size=64, verbose=False)
    with passed() as seen:
        et.fit(model, x, y, batch_size=64, verbose=False)
    ours = [one for one in seen if ".venv" not in one[0]]
    files = {file for file, *_ in ours}
    assert 300 < len(ours) <= MOST_FUNCTIONS
    assert 50 < len(files) <= MOST_FILES
