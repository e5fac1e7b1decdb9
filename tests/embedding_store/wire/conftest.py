"""What every test of the wire may hold until its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as held:
        yield held
