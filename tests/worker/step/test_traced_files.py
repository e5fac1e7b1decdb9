"""What AutoGraph writes leaves nothing behind, also in processes that are killed."""

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import inspect, os, signal
import tensorflow as tf
import elastable.worker.step.forward

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
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    files = tmp_path / "files"
    files.mkdir()
    run = subprocess.run(
        [sys.executable, str(program)], env={"PATH": "/usr/bin:/bin", "TMPDIR": str(files)}, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.returncode == -9, run.stderr[-2_000:]
    assert not list(files.glob("__autograph*")), [path.name for path in files.iterdir()]
