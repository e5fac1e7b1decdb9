"""What takes part in a race of the click model."""

from abc import ABC, abstractmethod
from typing import Self


class Contender(ABC):
    """Trains the click model, a while at a time; to be closed."""

    @abstractmethod
    def start(self) -> None:
        """Begins with importing, building and compiling; returns at once."""

    @abstractmethod
    def warm_up(self) -> None:
        """Waits until steps have been made, and pauses."""

    @abstractmethod
    def examples_per_second(self, seconds: float) -> float:
        """Trains for about that long, and pauses."""

    @abstractmethod
    def close(self) -> None:
        """Ends its processes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
