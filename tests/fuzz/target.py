"""What is fuzzed: one case at a time, and between cases a look at whether everything still works."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from contextlib import ExitStack
from typing import Self

from elastable.embedding_store import errors
from elastable.embedding_store.errors import ElastableError
from tests.fuzz.mutator import Mutator

__all__ = ["Finding", "Target", "is_named"]


class Finding(AssertionError):
    """What should not have happened: an error without a name, or a server that is not what it was."""


def is_named(error: BaseException) -> bool:
    """Whether an error is one of `elastable.embedding_store.errors`, or of a kind below one of them."""
    return isinstance(error, ElastableError) and type(error) is not ElastableError


class Target(ABC):
    """One thing that reads what others wrote.

    A context manager: what it needs (a server, files) is made when it is entered.

    Attributes:
        name: What the command line calls it.
        share: How many of its cases are run in one round of a campaign.
        outcomes: How often cases ended how: "done", or the name of an error's class.
    """

    name: str
    share: int = 100

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.held = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self.held.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.held.close()

    def open(self) -> None:  # noqa: B027 - many need nothing
        """Makes what the cases need, and leaves its end to `held`."""

    def run(self, m: Mutator) -> None:
        """One case.

        Raises:
            Exception: whatever is no error with a name.
        """
        try:
            self.outcomes[self.case(m) or "done"] += 1
        except ElastableError as error:
            if not is_named(error):
                raise Finding(f"the root of all errors names nothing: {error}") from error
            self.outcomes[_name(error)] += 1

    @abstractmethod
    def case(self, m: Mutator) -> str | None:
        """Feeds one hostile value in; what came of it, None for no error."""

    def check(self) -> None:  # noqa: B027 - readers of files keep nothing
        """Raises where what was fuzzed does not work any more as it should."""


def _name(error: ElastableError) -> str:
    """Of the nearest class that a client is told of."""
    return next(base.__name__ for base in type(error).__mro__ if base.__name__ in errors.__all__)
