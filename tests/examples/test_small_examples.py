"""The examples of the docs are the files that run, and they learn."""

import os
from pathlib import Path

import keras

import elastable as et
from elastable.worker.user_model.model_file import load_model_file
from tests.preloaded.client import run_preloaded

ROOT = Path(__file__).parents[2]


def test_the_twenty_lines_of_the_docs_are_the_file() -> None:
    code = (ROOT / "examples" / "minimal.py").read_text().split('"""\n', 1)[1].strip()
    assert f"```python\n{code}\n```" in (ROOT / "docs" / "model-file.md").read_text()


def test_the_minimal_model_learns() -> None:
    keras.utils.set_random_seed(0)
    file = load_model_file(ROOT / "examples" / "minimal.py")
    fitted = et.fit(
        file.model(), file.reader("train"), validation_data=file.reader("validation"), batch_size=256, verbose=False
    )
    assert fitted.history["val_AUC"][-1] > 0.9


def test_the_notebook_runs() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"}
    ran = run_preloaded([str(ROOT / "examples" / "notebook_fit.py")], ROOT, environment)
    assert ran.returncode == 0, ran.stderr
    assert "parameters exported" in ran.stdout
