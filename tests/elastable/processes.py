"""Real `elastable` processes for tests: started, waited for with a limit, and always ended.

They and their workers are forks of a process that has imported TensorFlow, which takes five seconds of a core, or of
one on another backend; with `new=True` all are new interpreters.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.preloaded.client import HERE, Interpreter, PreloadedProcess, run_preloaded

LIMIT_S = 280.0  # TensorFlow takes seconds to load, and many times that on a busy machine
CLICK_JOB = Path(__file__).with_name("click_job.py")
_ROOT = Path(__file__).parents[2]


def counted_by_workers(run: Path) -> list[int]:
    """How many micro-batches each local worker of a run says it counted, evaluation included."""
    said = [re.findall(r"(\d+) micro-batches counted", log.read_text()) for log in sorted(run.glob("worker-*.log"))]
    assert all(len(numbers) == 1 for numbers in said), said
    return [int(number) for (number,) in said]


@dataclass(frozen=True)
class Finished:
    """What a command ended with; `out` and `err` with their line breaks as they were."""

    code: int
    out: str
    err: str


@dataclass
class Running:
    process: PreloadedProcess | subprocess.Popen[bytes]
    out_file: Path
    err_file: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def out(self) -> str:
        return self.out_file.read_text()

    @property
    def err(self) -> str:
        return self.err_file.read_text()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The exit code; fails with the process's output where it takes longer."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s} s:\n{self.out}\n{self.err}") from None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def children(self) -> list[int]:
        """Process ids of the workers it started."""
        return _children(self.pid)

    def address(self, host: str = "127.0.0.1") -> str:
        """`host:port` that it says it listens on."""
        wait_until(lambda: f" at {host}:" in self.out or self.process.poll() is not None, "an address", self)
        assert " at " in self.out, self.err
        return self.out.split(" at ", 1)[1].split(",", 1)[0]

    def url(self) -> str:
        """Of its metrics and its page."""
        said = "metrics and health at "
        wait_until(lambda: said in self.out or self.process.poll() is not None, "an address of metrics", self)
        found = re.search(rf"{said}(\S+)\n", self.out)
        assert found, self.err
        return found[1]


@dataclass(frozen=True)
class Hold:
    """Holds a master in the middle of `click_job`; see there."""

    home: Path
    version: int

    @property
    def environment(self) -> dict[str, str]:
        self.home.mkdir(parents=True, exist_ok=True)
        return {"HOLD": str(self.home), "HOLD_AT": str(self.version)}

    def wait(self, master: Running) -> None:
        held = self.home / "held"
        wait_until(lambda: held.exists() or master.process.poll() is not None, "the version to hold at", master)
        assert held.exists(), f"{master.out}\n{master.err}"

    def go(self) -> None:
        (self.home / "go").touch()


@contextmanager
def elastable(
    home: Path,
    *arguments: str | Path,
    env: dict[str, str] | None = None,
    name: str = "process",
    new: bool = False,
    of: Interpreter = HERE,
) -> Iterator[Running]:
    """Starts `elastable ARGUMENTS`; what of it runs at the end of the block is killed, workers included."""
    home.mkdir(parents=True, exist_ok=True)
    files = home / f"{name}.out", home / f"{name}.err"
    words = ["-m", "elastable", *map(str, arguments)]
    with files[0].open("wb") as out, files[1].open("wb") as err:
        process: PreloadedProcess | subprocess.Popen[bytes]
        if new:
            command, nothing = [sys.executable, *words], subprocess.DEVNULL
            process = subprocess.Popen(command, stdin=nothing, stdout=out, stderr=err, cwd=_ROOT, env=_environment(env))
        else:
            process = PreloadedProcess(words, out, err, _ROOT, _environment(env), of)
    running = Running(process, *files)
    try:
        yield running
    finally:
        for pid in [*running.children(), running.pid] if process.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(60)


def run_elastable(
    *arguments: str | Path,
    env: dict[str, str] | None = None,
    new: bool = False,
    of: Interpreter = HERE,
    limit_s: float = LIMIT_S,
) -> Finished:
    words = ["-m", "elastable", *map(str, arguments)]
    if new:
        command, variables = [sys.executable, *words], _environment(env)
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False, cwd=_ROOT, env=variables
        )
    else:
        ran = run_preloaded(words, _ROOT, _environment(env), limit_s, of)
    return Finished(ran.returncode, ran.stdout, ran.stderr)


def succeeded(
    *arguments: str | Path, env: dict[str, str] | None = None, new: bool = False, of: Interpreter = HERE
) -> Finished:
    ran = run_elastable(*arguments, env=env, new=new, of=of)
    assert ran.code == 0, f"{ran.out}\n{ran.err}"
    return ran


def wait_until(condition: Callable[[], object], what: str, process: Running, limit_s: float = LIMIT_S) -> None:
    """Waits for a condition; fails with the output of `process` where it takes longer."""
    give_up = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up, f"no {what} after {limit_s} s:\n{process.out}\n{process.err}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether the process is there and has not ended (a zombie has)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def environment_of(pid: int) -> dict[str, str]:
    return dict(pair.partition("=")[::2] for pair in Path(f"/proc/{pid}/environ").read_text().split("\0"))


def command_of(pid: int) -> str:
    """The words of a process, each ended by a null character."""
    return Path(f"/proc/{pid}/cmdline").read_text()


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return []


def _environment(extra: dict[str, str] | None) -> dict[str, str]:
    # JAX, which TensorFlow imports where it is installed, sets the level of TensorFlow's log.
    inherited = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    # One width for every table, so that no word of it is broken.
    return {**inherited, "COLUMNS": "200", "NO_COLOR": "1", **(extra or {})}
