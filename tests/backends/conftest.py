"""The backends that tests run on."""

from pathlib import Path

import pytest

from tests.backends.on_backend import on_jax, on_torch
from tests.once import once
from tests.preloaded.client import Interpreter


@pytest.fixture(scope="session", params=["jax", pytest.param("torch", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    return on_jax(once(tmp_path_factory, "compiled", Path)) if request.param == "jax" else on_torch()
