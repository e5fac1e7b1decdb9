"""What jobs that nothing happens to train, with which others are compared."""

import pytest

from tests.equality.jobs import Numbers, train
from tests.once import once


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """What one worker process trains, with BatchNormalization and Dropout, rows with the master."""
    return once(tmp_path_factory, "alone", lambda home: train(home, 1, "adagrad"))


@pytest.fixture(scope="session")
def clipped(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    """Likewise, gradients clipped by the norm of all of them."""
    return train(tmp_path_factory.mktemp("clipped"), 1, "clipped")
