"""The backends, each with what its tests share."""

import pytest

from tests.backends.on_backend import OnBackend, on_jax, on_torch


@pytest.fixture(scope="module", params=["jax", pytest.param("torch", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> OnBackend:
    return on_jax() if request.param == "jax" else on_torch()
