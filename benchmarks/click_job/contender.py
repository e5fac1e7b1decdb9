"""What takes part in a race of the click model."""

import signal
import sys
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from elastable.embedding_store.closing import Closing


class Contender(Closing):
    """Trains the click model, a while at a time; to be closed, which ends its processes."""

    @abstractmethod
    def start(self) -> None:
        """Begins with importing, building and compiling; returns at once."""

    @abstractmethod
    def warm_up(self) -> None:
        """Waits until steps have been made, and pauses."""

    @abstractmethod
    def examples_per_second(self, seconds: float) -> float:
        """Trains for about that long, and pauses."""


C = TypeVar("C", bound=Contender)


@contextmanager
def ready(*contenders: C) -> Iterator[tuple[C, ...]]:
    """Contenders that are started at the same time, and have paused once all are warm."""
    # Ended from outside, too: those without a turn are stopped, and would stay so for ever.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with ExitStack() as held:
        for contender in contenders:
            held.enter_context(contender)
        for contender in contenders:
            contender.start()
        for contender in contenders:
            contender.warm_up()
        yield contenders
