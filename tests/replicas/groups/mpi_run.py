"""Runs a pytest file in four processes at once, each a member, and tells what became of every test in each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MEMBERS = 4
LIMIT_S = 200.0
_ROOT = Path(__file__).parents[3]


class Reporter:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            with self._file.open("a") as lines:
                lines.write(json.dumps([report.nodeid.split("::")[-1], report.outcome, report.longreprtext]) + "\n")


def in_members(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a module in as many processes of MPI, to their end."""
    mpiexec = [str(Path(sys.executable).with_name("mpiexec")), "-disable-auto-cleanup", "-n", str(MEMBERS)]
    command, nothing = [*mpiexec, sys.executable, "-m", module, *arguments], subprocess.DEVNULL
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=_ROOT, stdin=nothing
    )


def run_in_members(file: Path, home: Path) -> dict[str, list[tuple[int, str, str, str]]]:
    """Test function -> (rank, its name with parameters, outcome, report), of every member and parameter."""
    ran = in_members(__name__, str(file), str(home))
    found: dict[str, list[tuple[int, str, str, str]]] = {}
    for rank in range(MEMBERS):
        lines = home / f"{rank}.jsonl"
        assert lines.exists(), f"member {rank} ran nothing:\n{ran.stdout}\n{ran.stderr}"
        for line in lines.read_text().splitlines():
            name, outcome, report = json.loads(line)
            found.setdefault(name.partition("[")[0], []).append((rank, name, outcome, report))
    assert ran.returncode in (0, int(pytest.ExitCode.TESTS_FAILED)), f"{ran.stdout}\n{ran.stderr}"
    return found


def _member(file: str, home: str) -> int | pytest.ExitCode:
    rank = os.environ["PMI_RANK"]
    return pytest.main(
        [file, "-p", "no:cacheprovider", f"--basetemp={home}/{rank}"], plugins=[Reporter(Path(home) / f"{rank}.jsonl")]
    )


if __name__ == "__main__":
    sys.exit(int(_member(*sys.argv[1:])))
