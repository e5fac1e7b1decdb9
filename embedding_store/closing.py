"""Objects that are closed once, by a `with` block or by hand."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Is closed at the end of a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Frees connections, threads, files and memory. Closing twice has no effect."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
