"""What `et.fit(on=...)` cannot carry to a cluster is refused by name; `test_ray_jobs` tests its numbers."""

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import ray
import tensorflow as tf

import elastable as et
from elastable.embedding_store.errors import BadInput, ModelError
from tests.contracts.readers import start_ray

IDS = {"id": np.arange(8)}
LABELS = np.zeros((8, 1), np.float32)


def doubled(values: object) -> object:
    return values * 2  # type: ignore[operator]


def model(activation: str | Callable[[object], object] | None = None, dtype: str = "int64") -> keras.Model:
    ids = keras.Input((), dtype=dtype, name="id")
    rows = et.Embedding(None, 2, name="rows")(ids)
    made = keras.Model({"id": ids}, keras.layers.Dense(1, activation=activation)(rows))
    made.compile("sgd", "mse")
    return made


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"callbacks": [keras.callbacks.TerminateOnNaN()]}, r"callbacks=TerminateOnNaN .*MODEL\.py --on ray"),
        ({"store": "memory"}, "store='memory' with on='ray' is not carried"),
        ({"initial_epoch": 1, "epochs": 2}, "initial_epoch=1 with on='ray'"),
        ({"steps_per_epoch": 2}, "steps_per_epoch=2 with on='ray'"),
        ({"validation_freq": 2}, "validation_freq=2 .* evaluates after each epoch"),
        ({"lazy": None}, "lazy=None .* True or False"),
        ({"seed": None}, "needs seed="),
        ({"cluster": {"epochs": 3}}, r"cluster=\{'epochs': \.\.\.\}: is none of workers, stores"),
        ({"on": "ray://head:10001"}, "needs cluster=.*'checkpoint_dir'.*share"),
        ({"on": "nowhere", "cluster": {"checkpoint_dir": "c"}}, r"--on nowhere: write --on ray"),
        ({"on": None, "cluster": {}}, "cluster= needs on="),
    ],
)  # fmt: skip
def test_arguments_that_stay_in_this_process_are_refused(
    given: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=said):
        et.fit(model(), IDS, LABELS, **{"on": "ray", "seed": 1, **given})  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_process_that_uses_ray_already_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start_ray()
    try:
        with pytest.raises(BadInput, match=r"this process uses Ray already; ray\.shutdown\(\)"):
            et.fit(model(), IDS, LABELS, seed=1, on="ray", verbose=0)
        assert ray.is_initialized()
    finally:
        ray.shutdown()


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
def test_classes_and_functions_of_the_users_are_refused() -> None:
    for activation, name in ((doubled, "doubled"), (lambda values: values, "a lambda")):
        with pytest.raises(ModelError, match=f"made of {name}, which is your own.*--on ray"):
            et.fit(model(activation), IDS, LABELS, seed=1, on="ray")


def test_data_that_is_no_file_and_no_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"x is a _BatchDataset, which is not carried .*et\.ParquetReader"):
        et.fit(model(), tf.data.Dataset.from_tensor_slices((IDS, LABELS)).batch(4), seed=1, on="ray")
    texts = {"id": np.array(["a"] * 8, object)}
    with pytest.raises(BadInput, match=r"x\['id'\] is an array of object"):
        et.fit(model(dtype="string"), texts, LABELS, seed=1, on="ray")
    file = tmp_path / "clicks.csv"
    file.write_text("id,y\n1,0\n2,1\n")
    reader = et.CsvReader(file, label="y", transform=lambda batch: batch)
    with pytest.raises(BadInput, match=r"x: et\.CsvReader\(transform=\) is a function"):
        et.fit(model(), reader, seed=1, on="ray")
