"""`--delays 7`: threads stand still at places which the number decides, to find tests that count on quick ones.

In each test one place of forty (a line of the project or of its tests that calls something or returns) takes up to
0.3 s the first times that any thread comes by. What passes only where another thread is quick then fails. Places
differ from test to test and from number to number, so several numbers find more. Processes which a test starts are
not delayed; a busy machine does that.
"""

import random
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import CodeType, FrameType

import pytest

ROOT = str(Path(__file__).parents[2])
#: Of all places.
SHARE = 1 / 40
#: Not delayed: the plugins themselves, and what is installed below the checkout.
NEVER = (str(Path(__file__).parent), f"{ROOT}/.venv")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--delays", type=int, help="threads stand still at places that this number decides")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fixtures are delayed as well: they start the threads."""
    if item.config.option.delays is None:
        return (yield)
    delays = Delays(f"{item.config.option.delays}/{item.nodeid}")
    threading.setprofile(delays)
    sys.setprofile(delays)
    try:
        return (yield)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        delays.left_s = 0.0


class Delays:
    """A profile function that sleeps at some places, for at most `left_s` seconds in all."""

    def __init__(self, seed: str, times: int = 3, left_s: float = 2.0) -> None:
        self.seed = seed
        self.times = times
        self.left_s = left_s
        self._left: dict[tuple[CodeType, str, int], int] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        """What Python calls before and after each call."""
        if self.left_s <= 0:
            return
        place = (frame.f_code, event, frame.f_lineno)
        left = self._left.get(place)
        if left is None:
            left = self._left[place] = self._decide(*place)
        if left:
            self._left[place] = left - 1
            delay = random.Random(f"{self.seed}/{left}/{frame.f_lineno}").uniform(0.001, 0.3)
            self.left_s -= delay
            time.sleep(delay)

    def _decide(self, code: CodeType, event: str, line: int) -> int:
        name = code.co_filename
        if not name.startswith(ROOT) or name.startswith(NEVER):
            return 0
        chance = random.Random(f"{self.seed}/{name.removeprefix(ROOT)}/{code.co_qualname}/{event}/{line}")
        return self.times if chance.random() < SHARE else 0
