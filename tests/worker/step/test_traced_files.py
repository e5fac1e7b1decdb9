"""What AutoGraph writes leaves nothing behind, also in processes that are killed."""

import os
from pathlib import Path

from tests.preloaded.client import run_preloaded

_PROGRAM = """
import inspect, os, signal, tempfile
import tensorflow as tf
import elastable.worker.step.forward

tempfile.tempdir = None  # it was looked for before the fork

@tf.function
def traced(values):
    for value in values:
        if value > 2.0:
            tf.debugging.assert_less(value, 3.0, message="too large")
    return values

traced(tf.constant([1.0, 2.0]))
converted = tf.autograph.to_graph(traced.python_function)
assert "too large" in inspect.getsource(converted)
try:
    traced(tf.constant([5.0]))
except tf.errors.InvalidArgumentError as error:
    assert "too large" in str(error)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_no_files_of_autograph(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    files = tmp_path / "files"
    files.mkdir()
    ran = run_preloaded(["program.py"], tmp_path, {**os.environ, "TMPDIR": str(files)})
    assert ran.returncode == -9, ran.stderr
    assert not list(files.glob("__autograph*")), [path.name for path in files.iterdir()]
