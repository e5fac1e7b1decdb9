"""Writes docs/keras.md: `python -m tests.keras_table`, or `make keras-table`.

    python -m tests.keras_table [--jax PYTHON] [--torch PYTHON]

The programs run here on TensorFlow, and in other processes on JAX and PyTorch: with this Python, and with that of
`make test-torch`.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.keras_table.page import OTHERS, SECTIONS, Verdicts, page, verdicts

_ROOT = Path(__file__).parents[2]


def main() -> None:
    """Runs every case; writes nothing where one differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.keras_table", description=__doc__)
    parser.add_argument("--verdicts", action="store_true", help="print those of this backend, as JSON")
    parser.add_argument("--jax", default=sys.executable)
    parser.add_argument("--torch", default=str(_ROOT / ".venv-torch" / "bin" / "python"))
    options = parser.parse_args()
    found, wrong = verdicts(SECTIONS)
    if options.verdicts:
        print(json.dumps([found, wrong]))
        return
    elsewhere = {}
    for backend in OTHERS:
        elsewhere[backend], differing = on(backend, getattr(options, backend))
        wrong += differing
    if wrong:
        sys.exit("\n".join(["These are neither as in Keras nor refused:", *wrong]))
    (_ROOT / "docs" / "keras.md").write_text(page(found, elsewhere))


def on(backend: str, python: str) -> tuple[Verdicts, list[str]]:
    """What `verdicts` returns on another backend."""
    command = [python, "-m", "tests.keras_table", "--verdicts"]
    environment = {**os.environ, "KERAS_BACKEND": backend}
    ran = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, check=True)
    found, wrong = json.loads(ran.stdout.splitlines()[-1])
    return found, [f"{backend}: {line}" for line in wrong]


if __name__ == "__main__":
    main()
