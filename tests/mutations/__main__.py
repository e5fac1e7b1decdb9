"""`python -m tests.mutations`: changes each condition of `drawn.json` in a copy of the tree, and runs its room's tests.

* `--draw SEED --each 15` draws another list instead;
* `--only 3,17` runs some of them, by number;
* `--processes N` runs so many at once.

A mutation is noticed where a quick test of its room (`--quick`) fails, or else one of its modules that take longer
(`DEAREST`); without a mutation none may. Equivalent ones, which the list gives the reason of, are not run. The exit
code is 1 where fewer than nine of ten others are noticed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

from tests.mutations.drawing import ROOMS, ROOT, Mutation, draw
from tests.plugins.order import DEAREST

LIST = Path(__file__).with_name("drawn.json")
_LIMIT_S = 900
_NO_TESTS = 5  # of pytest
_SHARE = 0.9
_PACKAGES = ("elastable", "embedding_store", "master", "replicas", "worker")
_BESIDE = ("deploy", "docs", "examples", "proto", "tests")


def copied(home: Path) -> Path:
    """A copy of what tests need, whose own packages are imported there."""
    for part in (*_PACKAGES, *_BESIDE):
        shutil.copytree(ROOT / part, home / part, symlinks=True)
    for file in ("pyproject.toml", "Makefile", "CHANGELOG.md", "README.md", "constraints.txt"):
        shutil.copy(ROOT / file, home / file)
    return home


def tests_fail(tree: Path, room: str) -> bool:
    """Whether a test of a room fails in a copy of the tree: a quick one, or else one of those that take longer."""
    dearer = [module for module in sorted(DEAREST) if module.startswith(f"{ROOMS[room]}/")]
    return _fail(tree, "--quick", ROOMS[room]) or _fail(tree, "-m", "not slow and not process", *dearer)


def _fail(tree: Path, *tests: str) -> bool:
    words = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    try:
        ran = subprocess.run(
            words,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True  # a test that waits for ever notices, too
    # Below 0: a signal ended it. Of the dearer modules of a room each may start processes: then no test is left.
    assert ran.returncode <= 2 or ran.returncode == _NO_TESTS, f"{tests}: pytest ended with {ran.returncode}"
    return ran.returncode not in (0, _NO_TESTS)


def is_noticed(tree: Path, mutation: Mutation) -> bool:
    """Whether the tests of the mutation's room notice it in a copy of the tree, which is as before afterwards."""
    file = tree / mutation.file
    source = file.read_text()
    file.write_text(mutation.applied(source))
    try:
        return tests_fail(tree, mutation.room)
    finally:
        file.write_text(source)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--draw", type=int, metavar="SEED")
    parser.add_argument("--each", type=int, default=15, help="mutations of each room")
    parser.add_argument("--only", default="", help="numbers, with commas")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args(arguments)
    if given.draw is not None:
        drawn = [{name: said for name, said in asdict(each).items() if said} for each in draw(given.draw, given.each)]
        LIST.write_text(json.dumps(drawn, indent=1) + "\n")
        return 0
    every = [Mutation(**each) for each in json.loads(LIST.read_text())]
    wanted = [int(number) for number in given.only.split(",") if number] or list(range(len(every)))
    numbers = [number for number in wanted if not every[number].equivalent]
    trees: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutations-") as home:
        for place in range(given.processes):
            trees.put(copied(Path(home) / str(place)))

        def noticed(number: int) -> bool:
            tree, began = trees.get(), time.monotonic()
            try:
                found = is_noticed(tree, every[number])
            finally:
                trees.put(tree)
            said = "noticed" if found else "NOT NOTICED"
            print(f"{number}: {said} in {time.monotonic() - began:.0f} s: {every[number]}", flush=True)
            return found

        for room in dict.fromkeys(every[number].room for number in numbers):
            assert not tests_fail(Path(home) / "0", room), f"{room}: its quick tests fail without a mutation"
        with ThreadPoolExecutor(given.processes) as threads:
            found = list(threads.map(noticed, numbers))
    print(f"{sum(found)} of {len(found)} noticed; {len(wanted) - len(numbers)} others are equivalent")
    return 0 if sum(found) >= _SHARE * len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
