"""The backends of Keras: each with an interpreter that has it, and processes that have no other framework."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.preloaded.client import Interpreter

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("tensorflow", "jax", "torch")
#: That `make test-torch` makes.
TORCH_PYTHON = ROOT / ".venv-torch" / "bin" / "python"


def on_jax(compiled: Path) -> Interpreter:
    """With a folder in which processes keep what they compile, which are the same functions again and again."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("jax is not installed here: make test installs it")
    everything = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    quickly = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    everything |= {"JAX_COMPILATION_CACHE_DIR": str(compiled), "XLA_FLAGS": quickly}
    return _alone("jax", Path(sys.executable), **everything)


def on_torch() -> Interpreter:
    if not TORCH_PYTHON.exists():
        pytest.skip("PyTorch is not installed here: make test-torch makes an environment for it")
    return _alone("torch", TORCH_PYTHON)


def _alone(name: str, python: Path, **variables: str) -> Interpreter:
    missing = ",".join(other for other in FRAMEWORKS if other != name)
    path = os.pathsep.join([str(ROOT / "tests" / "backends" / "own_alone"), str(ROOT)])
    variables |= {"KERAS_BACKEND": name, "MISSING_FRAMEWORKS": missing, "PYTHONPATH": path}
    return Interpreter(str(python), tuple(variables.items()))
