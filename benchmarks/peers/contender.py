"""The harness' end of a side: a process that prepares itself and runs rounds on request."""

import json
import os
import selectors
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.contract.malformed import Document

_ROOT = Path(__file__).parents[2]
_PREPARE_S = 300.0
_ROUND_S = 120.0
_END_S = 20.0


class ContenderFailed(Exception):
    """A side could not prepare or run; the message has its own words."""


class Contender(Closing):
    """One side of a race. Stopped (`SIGSTOP`) whenever it has no turn, so that not even its idle threads spin."""

    def __init__(self, python: Path, side: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
        """Starts the process.

        Args:
            python: The interpreter of the side's environment.
            side: Its module, with `prepare(race, settings)`.
            log: Where its standard error and prints go.
            environment: Variables in addition to this process' own.
        """
        self.side = side
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.peers.rounds", side, str(os.getpid())],
                cwd=_ROOT,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    @property
    def process_id(self) -> int:
        """Of the side's process."""
        return self._process.pid

    def prepare(self, race: str, settings: Mapping[str, object]) -> str:
        """Makes it ready for a race; the library's name and version.

        Raises:
            ContenderFailed: it could not, or not in time.
        """
        return str(self._ask({"prepare": race, "settings": settings}, _PREPARE_S)["library"])

    def round(self, seconds: float) -> float:
        """Lets it run for about that long; its amount a second. Raises `ContenderFailed`."""
        return float(self._ask({"round": seconds}, _ROUND_S)["rate"])

    def close(self) -> None:
        """Ends the process. Closing twice is harmless."""
        process = self._process
        if process.poll() is None:
            process.kill()  # works on a stopped process, too
        process.wait(_END_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # a request that it did not live to read
                    pipe.close()

    def _ask(self, request: Mapping[str, object], timeout_s: float) -> Document:
        process = self._process
        assert process.stdin is not None
        process.send_signal(signal.SIGCONT)
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answer: Document = json.loads(self._line(timeout_s))
        process.send_signal(signal.SIGSTOP)
        if "failed" in answer:
            raise ContenderFailed(f"{self.side}: {answer['failed']}")
        return answer

    def _line(self, timeout_s: float) -> bytes:
        """The next line that it answers, within so many seconds."""
        pipe = self._process.stdout
        assert pipe is not None
        with selectors.DefaultSelector() as ready:
            ready.register(pipe, selectors.EVENT_READ)
            if not ready.select(timeout_s):
                raise ContenderFailed(f"{self.side} has not answered within {timeout_s:g} s; {self._output()}")
        line = pipe.readline()  # written in one go
        if not line.endswith(b"\n"):
            raise self._ended()
        return line

    def _ended(self) -> ContenderFailed:
        return ContenderFailed(f"{self.side} has ended with exit code {self._process.wait(_END_S)}; {self._output()}")

    def _output(self) -> str:
        return f"it said:\n{self._log.read_text(errors='replace')[-2000:]}"
