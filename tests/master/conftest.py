"""What tests of the master share."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held
