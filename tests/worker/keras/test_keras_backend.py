"""Backends of Keras that nothing runs on: refused in one sentence, before they are imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import aligned
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


def test_a_tensor_shares_memory_only_with_what_nobody_changes() -> None:
    """Aligned or not: a batch is the user's, and may be changed after the step has seen it."""
    for start in range(4):
        given = aligned((2_000,), np.float32)[start:]
        given[:] = 1
        apart, shared = backend().tensor(given), backend().tensor(given, ours=True)
        given[:] = 2
        assert apart.numpy().tolist() == [1] * len(given)
        assert shared.numpy().tolist() == [1 if start else 2] * len(given)


@pytest.mark.parametrize("array", [np.int64(3), np.array(["a"] * 2_000), np.ones((2, 3_000), bool), np.zeros((0, 9))])
def test_a_tensor_of_any_array(array: np.ndarray) -> None:
    for ours in (False, True):
        tensor = backend().tensor(array, ours)
        assert tensor.shape == array.shape
        assert [each.decode() if isinstance(each, bytes) else each for each in tensor.numpy().ravel().tolist()] == (
            array.ravel().tolist()
        )
