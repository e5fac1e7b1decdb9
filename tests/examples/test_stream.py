"""The example of a stream: what it is made of, and, at night, the whole of it."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import redis

import elastable as et
from elastable.worker.user_model.model_file import load_model_file

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "stream"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module("run")


def test_it_learns_from_the_clicks_of_a_stream(
    run: ModuleType, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLICKS", redis_url)
    tastes = run.Tastes(seed=1)
    with redis.Redis.from_url(redis_url) as client:
        run.send(client, tastes.draw(8_000, 0.0))
    file = load_model_file(EXAMPLE / "clicks.py")
    trained = file.model()
    et.fit(trained, file.reader("train"), batch_size=256, until="end", verbose=False)
    new = tastes.draw(2_000, 0.0)
    predicted = trained.predict({name: new[name] for name in run.INPUTS}, verbose=0)
    assert run.auc(new["clicked"], np.ravel(predicted)) > 0.75


def test_its_auc_is_the_share_of_pairs_in_order(run: ModuleType) -> None:
    clicked, predicted = np.array([1, 0, 1, 0, 0]), np.array([0.9, 0.4, 0.4, 0.1, 0.95])
    ones, others = predicted[clicked == 1, np.newaxis], predicted[clicked == 0]
    assert run.auc(clicked, predicted) == pytest.approx(((ones > others) + 0.5 * (ones == others)).mean())


@pytest.mark.slow
def test_live_predictions_are_better_than_those_of_a_model_that_stands_still() -> None:
    words = [sys.executable, str(EXAMPLE / "run.py"), "--seconds", "40"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"}
    ran = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "better" in ran.stdout
