"""Backends of Keras that nothing runs on: refused in one sentence, before they are imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastable.embedding_store.errors import BadInput
from elastable.master.backend.contract import backend

PROGRAM = """
import sys
import elastable as et
et.MemoryStore  # tables need no Keras
try:
    {name}
except et.ElastableError as error:
    print(type(error).__name__, error)
assert "keras" not in sys.modules
"""


def output(name: str, **environment: str) -> str:
    inherited = {key: value for key, value in os.environ.items() if key not in ("KERAS_BACKEND", "KERAS_HOME")}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(name=name)],
        env={**inherited, **environment}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize(
    ("backend", "name", "able"),
    [
        ("numpy", "et.Embedding(10, 4)", "tensorflow or jax or torch"),
        ("jax", "et.summed", "tensorflow"),
    ],
)
def test_another_backend_is_refused_in_one_sentence(backend: str, name: str, able: str) -> None:
    assert output(name, KERAS_BACKEND=backend) == (
        f"Unsupported elastable.{name.removeprefix('et.').partition('(')[0]}: runs on Keras' backend {able}, and Keras "
        f"is set to {backend!r}: set KERAS_BACKEND=tensorflow before anything imports Keras"
    )


def test_the_file_of_keras_counts_where_the_environment_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "keras.json").write_text(json.dumps({"backend": "openvino"}))
    assert "set to 'openvino'" in output("et.fit", KERAS_HOME=str(tmp_path))


def test_more_threads_than_tensorflow_can_count() -> None:
    with pytest.raises(BadInput, match="intra_op_threads 2147483648: at most 2147483647"):
        backend().set_threads(2**31)
