"""Training in a notebook: `et.fit` trains in this process, and the model is an ordinary Keras model afterwards.

Cells are marked with `# %%`; `python examples/notebook_fit.py` runs them all.
"""

# %% Films that people like or not; every film and every person has hidden features.
import tempfile
from pathlib import Path

import keras
import numpy as np

import elastable as et

random = np.random.default_rng(0)
characters = {"person": random.normal(size=(2_000, 3)), "film": random.normal(size=(500, 3))}
x = {name: random.integers(0, len(known), 60_000) for name, known in characters.items()}
affinity = (characters["person"][x["person"]] * characters["film"][x["film"]]).sum(axis=1)
y = (affinity > 0).astype("float32")
train, held_out = slice(0, 50_000), slice(50_000, None)

# %% An ordinary Keras model. Its tables take any int64 id, and hold a row for each id that was trained.
people, films = (keras.Input((), name=name, dtype="int64") for name in ("person", "film"))
likes = keras.layers.Dot(axes=1)(
    [et.Embedding(None, 8, name="people")(people), et.Embedding(None, 8, name="films")(films)]
)
model = keras.Model({"person": people, "film": films}, keras.layers.Activation("sigmoid")(likes))
model.compile(keras.optimizers.Adagrad(0.3, initial_accumulator_value=1e-6), "binary_crossentropy", metrics=["AUC"])

# %% Train, with the tables in a store inside this process.
store = et.MemoryStore()
history = et.fit(
    model,
    {name: ids[train] for name, ids in x.items()},
    y[train],
    validation_data=({name: ids[held_out] for name, ids in x.items()}, y[held_out]),
    epochs=3,
    batch_size=512,
    store=store,
)
print({name: [round(value, 3) for value in values] for name, values in history.history.items()})

# %% Predict, and keep a plain Keras file that needs no Elastable to load.
print(model.predict({name: ids[-5:] for name, ids in x.items()}, verbose=0)[:, 0].round(2), y[-5:])
with tempfile.TemporaryDirectory() as folder:
    et.export_keras(model, store, Path(folder) / "films.keras")
    print(keras.models.load_model(Path(folder) / "films.keras").count_params(), "parameters exported")
