"""What is fuzzed, and campaigns: many cases of many targets in rounds, with checks that everything still works."""

import gc
import resource
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from elastable.embedding_store import errors
from elastable.embedding_store.errors import ElastableError
from tests.fuzz.mutator import Mutator


class Finding(AssertionError):
    """What should not have happened: an error without a name, or a server that is not what it was."""


def is_named(error: BaseException) -> bool:
    return isinstance(error, ElastableError) and type(error) is not ElastableError


class Target(ABC):
    """One thing that reads what others wrote.

    A context manager: what it needs (a server, files) is made when it is entered.
    """

    name: str  # what the command line calls it; a class that has one is a target
    share: int = 100  # how many of its cases are run in one round of a campaign

    known: ClassVar[list[type["Target"]]] = []  # all targets of the modules that were imported

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            Target.known.append(cls)

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()  # how often cases ended how: "done", or the name of an error's class
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
    """Of the nearest class that a client receives."""
    return next(base.__name__ for base in type(error).__mro__ if base.__name__ in errors.__all__)


_ROUNDS_A_CHECK = 10
_MOST_FINDINGS = 20
_PAGE_BYTES = resource.getpagesize()


@dataclass(slots=True)
class Report:
    cases: int = 0  # that were run
    seconds: float = 0.0  # that they took
    findings: list[str] = field(default_factory=list)  # what went wrong, with what to say to see it again
    memory: list[int] = field(default_factory=list)  # bytes that the process held, after each round

    @property
    def growth(self) -> float:
        """By which share the memory at the end is above that at half time; each is the median of some rounds."""
        half, some = len(self.memory) // 2, max(1, len(self.memory) // 10)
        if not half:
            return 0.0
        middle, end = (sorted(part)[len(part) // 2] for part in (self.memory[half : half + some], self.memory[-some:]))
        return end / middle - 1


@dataclass(frozen=True, slots=True)
class Campaign:
    targets: Sequence[type[Target]]  # what is fuzzed
    cases: int | None = None  # after so many it ends; None: `seconds` says it
    seconds: float | None = None  # after so many it ends
    seed: int = 0  # case n of a target is the same with every campaign of one seed
    first: int = 0  # number of the first case of each target
    scale: float = 1.0  # by which shares of targets are multiplied
    tell: Callable[[str], None] = lambda line: None  # is given a line after each round

    def run(self) -> Report:
        """Runs it, to its end or until there is much to look at."""
        report = Report()
        with ExitStack() as held:
            targets = [held.enter_context(kind()) for kind in self.targets]
            begun = time.monotonic()  # servers run, and what they compile is compiled
            numbers = dict.fromkeys((target.name for target in targets), self.first)
            rounds = 0
            while self._goes_on(report, time.monotonic() - begun):
                for target in targets:
                    self._run_some(target, numbers, report)
                rounds += 1
                if rounds % _ROUNDS_A_CHECK == 0:
                    self._check(targets, numbers, report)
                    gc.collect()
                report.memory.append(_memory())
                report.seconds = time.monotonic() - begun
                self.tell(self._line(report))
            self._check(targets, numbers, report)
            for target in targets:
                for came, count in sorted(target.outcomes.items()):
                    self.tell(f"{target.name}: {count} times {came}")
            report.seconds = time.monotonic() - begun
        return report

    def _goes_on(self, report: Report, seconds: float) -> bool:
        if len(report.findings) >= _MOST_FINDINGS:
            return False
        if self.cases is not None:
            return report.cases < self.cases
        return seconds < (self.seconds or 0.0)

    def _run_some(self, target: Target, numbers: dict[str, int], report: Report) -> None:
        for _ in range(max(1, round(target.share * self.scale))):
            if self.cases is not None and report.cases >= self.cases:
                return
            number = numbers[target.name]
            numbers[target.name] += 1
            report.cases += 1
            try:
                target.run(Mutator(f"{self.seed}/{target.name}/{number}"))
            except Exception as error:  # noqa: BLE001 - whatever has no name is what is looked for
                self._note(report, target, number, error)

    def _check(self, targets: Sequence[Target], numbers: dict[str, int], report: Report) -> None:
        for target in targets:
            try:
                target.check()
            except Exception as error:  # noqa: BLE001
                self._note(report, target, numbers[target.name], error)

    def _note(self, report: Report, target: Target, number: int, error: Exception) -> None:
        trace = "".join(traceback.format_exception(error)[-8:])
        again = f"--seed {self.seed} --only {target.name} --first {number} --cases 1"
        report.findings.append(f"{target.name}, case {number} ({again}):\n{trace}")
        self.tell(report.findings[-1])

    def _line(self, report: Report) -> str:
        rate = report.cases / max(report.seconds, 1e-9)
        return f"{report.cases} cases, {rate:.0f} a second, {report.memory[-1] >> 20} MiB, {len(report.findings)} found"


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
