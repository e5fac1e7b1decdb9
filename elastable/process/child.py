"""Another process of the `elastable` command, started by this one, and ended with it."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_WATCHES_STDIN = "ELASTABLE_PARENT_HOLDS_STDIN"


@dataclass(frozen=True, slots=True)
class EndedChild:
    """A process that has ended: its id, its exit code (-n: by signal n), and the file of what it wrote."""

    pid: int
    code: int
    log: Path

    def __str__(self) -> str:
        return f"ended with exit code {self.code}; see {self.log}"


def start_elastable(
    words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts `elastable WORDS` in a separate session, so that Ctrl-C reaches this process alone.

    Its standard input is a pipe whose other end this process holds, so that it sees this process end, also by SIGKILL
    (`when_parent_ends`). Close that end (`process.stdin`) once the process has ended.

    Args:
        words: The command and its options.
        log: File for everything that it writes; emptied first.
        environment: Variables in which its environment differs from this process'.
    """
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "elastable", *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, **(environment or {}), _WATCHES_STDIN: "1"},
        )


def when_parent_ends(end: Callable[[], None]) -> None:
    """Calls `end` in a thread once the process has ended that started this one by `start_elastable`, however it did.

    Nothing happens in a process that was started otherwise.
    """
    if os.environ.pop(_WATCHES_STDIN, None) is None:
        return

    def watch() -> None:
        while os.read(0, 1):  # nobody writes: it returns when the last holder of the other end is gone
            pass
        end()

    threading.Thread(target=watch, name="elastable-parent", daemon=True).start()
