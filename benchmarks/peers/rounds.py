"""A side's process: prepares itself, then runs rounds on request. Standard library only.

    python -m benchmarks.peers.rounds SIDE PARENT

Requests and answers are JSON, one per line, on standard input and output:

    {"prepare": race, "settings": {...}}  ->  {"library": name and version}
    {"round": seconds}                    ->  {"rate": amount per second}
    any failure                           ->  {"failed": traceback}

The process exits when standard input ends, or when the process PARENT does.
"""

import ctypes
import importlib
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO

_LEAST_RUNS = 3
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Turn:
    """What a side does when it is its turn.

    Attributes:
        library: Name and version of what is measured.
        work: One batch; takes the next of its inputs at each call.
        amount: Rows or ids that one call moves.
        clock: What the seconds of a call are: by default those of the clock; `time.process_time` counts those of the
            processors, of all threads together.
    """

    library: str
    work: Callable[[], object]
    amount: float
    clock: Callable[[], float] = time.perf_counter

    def rate(self, seconds: float) -> float:
        """Amount a second, of the median call; the first calls, into cold caches, do not count."""
        for _ in range(_LEAST_RUNS):
            self.work()
        took: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(took) < _LEAST_RUNS:
            began = self.clock()
            self.work()
            took.append(self.clock() - began)
        return self.amount / statistics.median(took)


def main(side: str, requests: IO[str], answers: IO[str]) -> None:
    """Answers requests until there are no more."""
    turn: Turn | None = None
    for line in requests:
        request = json.loads(line)
        try:
            if "prepare" in request:
                turn = _prepared(side, request["prepare"], request["settings"])
                answer: Mapping[str, object] = {"library": turn.library}
            elif turn is None:
                raise RuntimeError("a round before anything was prepared")
            else:
                answer = {"rate": turn.rate(request["round"])}
        except Exception:  # noqa: BLE001 - whatever a library raises is what the race shows
            answer = {"failed": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _prepared(side: str, race: str, settings: Mapping[str, object]) -> Turn:
    turn: Turn = importlib.import_module(side).prepare(race, settings)
    turn.rate(0.0)  # compiles, and finds out whether it runs at all
    return turn


def _die_with(parent: int) -> None:
    """A process that is stopped must not outlive a harness that was killed.

    Asked for here and not between fork and exec: the harness has threads,
    which may hold whatever a forked child would need.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it is gone already
        raise SystemExit(1)


if __name__ == "__main__":
    _die_with(int(sys.argv[2]))
    # Libraries print where they like: answers go their own way, and prints join the log.
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(sys.argv[1], sys.stdin, own)
