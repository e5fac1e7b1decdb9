"""Whole jobs whose tables are kept in 16 bits."""

from pathlib import Path

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.tables.row_blocks import convert_table
from elastable.master.api import JobSpec
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.writing import write_checkpoint
from elastable.master.tasks.progress import Progress
from tests.contracts.store_samples import commit, rows_by_id, update
from tests.elastable.small_models import USERS, clicks
from tests.keras_table.optimizer_cases import Halved
from tests.untyped import Keyword

DIM = 16


def model(
    table_dtype: str | None, optimizer: keras.optimizers.Optimizer | None = None, constraint: object = None
) -> keras.Model:
    users = keras.Input((), dtype="int64", name="user")
    table = et.Embedding(
        USERS, DIM, name="users", embeddings_initializer="glorot_normal", embeddings_constraint=constraint,
        table_dtype=table_dtype,
    )  # fmt: skip
    start = keras.initializers.GlorotUniform(seed=4)
    out = keras.layers.Dense(1, activation="sigmoid", kernel_initializer=start)(table(users))
    made = keras.Model(users, out)
    made.compile(optimizer or keras.optimizers.Adagrad(0.1), "binary_crossentropy")
    return made


def records() -> tuple[Array, Array]:
    x, y = clicks(256)
    return x["user"], y


def fitted(made: keras.Model, **arguments: Keyword) -> keras.Model:
    et.fit(made, records(), **{"epochs": 4, "batch_size": 16, "verbose": False, "seed": 0, **arguments})
    return made


def rows(made: keras.Model) -> np.ndarray:
    found: np.ndarray = made.get_layer("users").read_rows(np.arange(USERS))
    return found


def is_kept(table_dtype: str, values: np.ndarray) -> bool:
    """Whether every value is one of the dtype's own."""
    if table_dtype == "bfloat16":
        return not (values.view(np.uint32) & 0xFFFF).any()
    return bool((values.astype(np.float16).astype(np.float32) == values).all())


@pytest.fixture(scope="module")
def trained() -> dict[str | None, keras.Model]:
    """For tests that change none of them."""
    return {table_dtype: fitted(model(table_dtype)) for table_dtype in (None, "bfloat16", "float16")}


@pytest.mark.parametrize("table_dtype", ["bfloat16", "float16"])
def test_a_job_trains_narrow_tables_as_well_as_float32_ones(
    trained: dict[str | None, keras.Model], table_dtype: str
) -> None:
    narrow, wide = trained[table_dtype], trained[None]
    source = narrow.get_layer("users").source
    assert source.specs()["users"].dtype == table_dtype
    assert is_kept(table_dtype, rows(narrow))
    assert not is_kept(table_dtype, rows(wide))
    np.testing.assert_allclose(rows(narrow), rows(wide), atol=0.03 if table_dtype == "bfloat16" else 0.004)
    losses = [made.evaluate(*records(), verbose=0) for made in (narrow, wide)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


def test_two_calls_of_fit_end_in_the_bits_of_one(trained: dict[str | None, keras.Model]) -> None:
    whole, parts = trained["bfloat16"], fitted(model("bfloat16"), epochs=2)
    fitted(parts, initial_epoch=2)
    assert rows(parts).tobytes() == rows(whole).tobytes()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "keras"])
def test_constraints_and_keras_own_optimizers_work_on_narrow_rows(fused: bool) -> None:
    optimizer = keras.optimizers.Lion(0.01) if fused else Halved(0.2)
    made = fitted(model("float16", optimizer, keras.constraints.NonNeg()))
    assert is_kept("float16", rows(made))
    touched = np.unique(records()[0])
    assert (rows(made)[touched] >= 0).all()
    assert (rows(made)[touched] > 0).any()


def test_a_checkpoint_holds_the_dtype_and_training_goes_on_in_the_same_bits(tmp_path: Path) -> None:
    made = fitted(model("bfloat16"))
    store = made.get_layer("users").source
    version = store.version()
    write_checkpoint(tmp_path, store, {}, JobSpec(job="j"), Progress(version))
    with et.MemoryStore() as again:
        restore_tables(open_checkpoint(tmp_path), again)
        assert again.specs() == store.specs()
        assert rows_by_id(again, "users") == rows_by_id(store, "users")
        for there in (store, again):
            commit(there, {"users": update(np.arange(USERS), DIM)})
        assert rows_by_id(again, "users") == rows_by_id(store, "users")


def test_a_saved_model_keeps_its_narrow_table(trained: dict[str | None, keras.Model], tmp_path: Path) -> None:
    made = trained["float16"]
    made.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("users").table_dtype == "float16"
    assert rows(loaded).tobytes() == rows(made).tobytes()


def test_a_trained_model_is_served_from_int8() -> None:
    made = fitted(model("bfloat16"))
    layer, before = made.get_layer("users"), rows(made)
    with et.MemoryStore() as served:
        convert_table(layer.source, "users", served, "int8")
        assert served.specs()["users"].optimizer == OptimizerSpec()
        exact = made.predict(records()[0], verbose=0)
        layer.attach(served)
        np.testing.assert_allclose(rows(made), before, atol=float(np.abs(before).max()) / 254)
        np.testing.assert_allclose(made.predict(records()[0], verbose=0), exact, atol=0.01)
