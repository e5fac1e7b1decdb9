"""What jobs that nothing happens to train, with which others are compared."""

import pytest

from tests.equality.jobs import Numbers, train


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """What one worker process trains, with BatchNormalization and Dropout, rows with the master."""
    return train(tmp_path_factory.mktemp("alone"), 1, "adagrad")


@pytest.fixture(scope="session")
def clipped(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """Likewise, gradients clipped by the norm of all of them."""
    return train(tmp_path_factory.mktemp("clipped"), 1, "clipped")
