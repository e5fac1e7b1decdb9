"""Jobs whose tables live in several places."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.composite.locations import LocationSettings, TensorLocation, TensorLocationSettings
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, BadSpec
from elastable.embedding_store.open_store import open_store
from tests.elastable.processes import CLICK_JOB, succeeded
from tests.elastable.small_models import assert_same, clicks, store_model
from tests.untyped import Keyword

BATCH = 16


def placed(**overrides: str) -> LocationSettings:
    everywhere = TensorLocationSettings(TensorLocation("memory"), 0)
    return LocationSettings(everywhere, everywhere, overrides={n: TensorLocation(p) for n, p in overrides.items()})


def trained(optimizer: object, **more: Keyword) -> keras.Model:
    model = store_model()
    model.compile(optimizer, "binary_crossentropy", metrics=["AUC"])
    et.fit(model, clicks(BATCH * 6), epochs=2, batch_size=BATCH, verbose=False, **more)
    return model


class TestFit:
    def test_memory_and_redis_give_the_numbers_of_memory_alone(self, redis_url: str) -> None:
        with open_store(redis_url) as redis:
            stores = {"memory": MemoryStore(), "redis": redis}
            apart = trained(keras.optimizers.Adagrad(0.2), store=stores, locations=placed(words="redis"))
            assert list(redis.specs()) == ["words"]
            assert redis.version() == 12
            assert_same(apart, trained(keras.optimizers.Adagrad(0.2)))

    def test_a_table_on_the_worker_is_a_variable(self, tmp_path: Path) -> None:
        # Without an optimizer's memory of untouched rows, lazy and dense are the same numbers.
        model = trained(keras.optimizers.SGD(0.5), locations=placed(users="worker"))
        layer = model.get_layer("users")
        assert layer.on_worker
        assert [tuple(weight.shape) for weight in layer.weights] == [(30, 4)]
        other = trained(keras.optimizers.SGD(0.5))
        x = clicks(BATCH * 6)[0]
        np.testing.assert_allclose(model.predict(x, verbose=0), other.predict(x, verbose=0), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(layer.worker_rows(), other.get_layer("users").read_rows(np.arange(30)), atol=1e-5)
        model.save(tmp_path / "model.keras")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))

    def test_all_tables_on_the_worker(self) -> None:
        model = trained(keras.optimizers.SGD(0.5), locations=placed(users="worker", words="worker"))
        assert model.get_layer("users").on_worker
        assert model.get_layer("words").on_worker
        # It goes on as it is.
        before = model.get_layer("words").worker_rows()
        et.fit(model, clicks(BATCH * 6), batch_size=BATCH, verbose=False)
        assert not np.array_equal(model.get_layer("words").worker_rows(), before)

    def test_what_cannot_be_placed(self) -> None:
        with pytest.raises(BadInput, match="no store for the place 'redis'"):
            trained("sgd", locations=placed(users="redis"))
        with pytest.raises(BadSpec, match=r"override 'user'.*did you mean 'users'"):
            trained("sgd", locations=placed(user="memory"))
        with pytest.raises(BadInput, match="at least one store"):
            trained("sgd", store={})


@pytest.fixture
def locations(tmp_path: Path, redis_url: str) -> Path:
    path = tmp_path / "locations.toml"
    path.write_text(
        f'[stores]\nredis = "{redis_url}?namespace=places"\n[weight]\nmin_elements_for_off_worker = 1000\n'
        '[overrides]\nwords = "redis"\n'
    )
    return path


class TestCommand:
    def test_plan(self, locations: Path) -> None:
        ran = succeeded("plan", CLICK_JOB, "--locations", locations, "--json")
        output = json.loads(ran.out)
        lines = {(line["table"], line["kind"]): line for line in output["tables"]}
        assert lines["users", "weight"]["location"] == "worker"
        assert lines["users", "weight"]["bytes"] == 50 * 8 * 4
        assert "fewer than min_elements_for_off_worker=1,000" in lines["users", "weight"]["reason"]
        assert lines["words", "optimizer_state"]["location"] == "redis"
        assert lines["words", "weight"]["reason"] == "override by name"
        assert sum(variable["bytes"] for variable in output["dense"]) > 0
        shown = succeeded("plan", CLICK_JOB)
        assert "any id x 8" in shown.out
        assert "dense variables" in shown.out

    @pytest.mark.timeout(900)
    def test_a_job_trains_and_its_checkpoint_evaluates(self, locations: Path, tmp_path: Path) -> None:
        job = ("--epochs", "2", "--micro-batch-size", "32", "--grads-to-wait", "2", "--workers", "1")
        succeeded("train", CLICK_JOB, *job, "--locations", locations, "--run-dir", tmp_path)
        run = (tmp_path / "latest").resolve()
        result = json.loads((run / "result.json").read_text())
        assert result["auc"] > 0.8
        output = succeeded("evaluate", CLICK_JOB, "--checkpoint", result["checkpoint"])
        assert json.loads(output.out)["auc"] == pytest.approx(result["auc"], abs=1e-6)
        plain = keras.saving.load_model(run / "model.keras")
        assert "users" in [layer.name for layer in plain.layers]
