"""Which interpreter has a backend, and what a process needs to run on it alone."""

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("tensorflow", "jax", "torch")
#: That `make test-torch` makes.
TORCH_PYTHON = ROOT / ".venv-torch" / "bin" / "python"


@dataclass(frozen=True)
class OnBackend:
    """A backend of Keras, and an interpreter that has it."""

    name: str
    python: Path

    @property
    def environment(self) -> dict[str, str]:
        """Of a process on this backend that can import no other framework."""
        missing = ",".join(name for name in FRAMEWORKS if name != self.name)
        path = os.pathsep.join([str(ROOT / "tests" / "backends" / "own_alone"), str(ROOT)])
        return {"KERAS_BACKEND": self.name, "MISSING_FRAMEWORKS": missing, "PYTHONPATH": path}


def on_jax() -> OnBackend:
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed here (make test installs it)")
    return OnBackend("jax", Path(sys.executable))


def on_torch() -> OnBackend:
    if not TORCH_PYTHON.exists():
        pytest.skip("PyTorch has an environment of its own, which make test-torch makes")
    return OnBackend("torch", TORCH_PYTHON)
