"""Another process of the `elastable` command, started by this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EndedChild", "start_elastable"]


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
    """Starts `elastable WORDS` in a session of its own, so that Ctrl-C reaches this process alone.

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
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
