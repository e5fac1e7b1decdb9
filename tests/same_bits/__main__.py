"""`python -m tests.same_bits against COMMIT`: runs the jobs in a worktree of a commit and here, and compares them.

* `run --out DIR` runs the jobs of this tree and writes DIR/JOB.npz;
* `compare OLD_DIR NEW_DIR` compares two such folders;
* `noticed` shows that one changed bit of each job is noticed: one of its arrays in a copy, then one of its input in a
  second run.

`--only JOB,JOB` narrows each of them. The exit code is 1 where anything differs or is not noticed, or a job fails.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.same_bits.comparison import Compared, compare, with_one_bit_changed

ROOT = Path(__file__).parents[2]
_KEPT = ROOT / "build" / "same-bits"  # kernels that an old commit compiled, for the next comparison with it


def run(out: Path, only: list[str]) -> bool:
    """Whether all jobs ended as they should."""
    from tests.same_bits.arrays import require_own_tree
    from tests.same_bits.jobs import JOBS

    require_own_tree()
    out.mkdir(parents=True, exist_ok=True)
    for name in set(only) - set(JOBS):
        print(f"{name}: no such job in this tree", flush=True)
    failed = []
    for name in [name for name in JOBS if not only or name in only]:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"same-bits-{name}-") as home:
            try:
                np.savez(out / f"{name}.npz", **JOBS[name](Path(home)))  # type: ignore[arg-type]
            except Exception:  # noqa: BLE001 - shown, and the next job runs
                traceback.print_exc(file=sys.stdout)
                failed.append(name)
        print(f"{name}: {'FAILED' if name in failed else 'done'} in {time.monotonic() - began:.0f} s", flush=True)
    return not failed


def _running(tree: Path, out: Path, only: list[str], **environment: str) -> subprocess.Popen[bytes]:
    """`run` in a tree, by its own copy of this program; what it says goes to a file next to its arrays."""
    out.mkdir(parents=True)
    words = [sys.executable, "-m", "tests.same_bits", "run", "--out", str(out)]
    words += ["--only", ",".join(only)] if only else []
    # Before the paths of the environment, which name the tree that is installed in it.
    env = {**os.environ, "PYTHONPATH": str(tree), "TF_NUM_INTRAOP_THREADS": "1", **environment}
    with (out / "log").open("wb") as log:
        return subprocess.Popen(words, cwd=tree, env=env, stdout=log, stderr=subprocess.STDOUT)


def _ended(runs: Mapping[str, tuple[subprocess.Popen[bytes], Path]]) -> bool:
    """Waits for runs by name; whether all did as they should. Shows the log of one that did not."""
    codes = {name: process.wait() for name, (process, _) in runs.items()}
    for name, code in codes.items():
        if code:
            print(f"{name}: the run ended with {code}:\n{(runs[name][1] / 'log').read_text()}")
    return not any(codes.values())


def against(commit: str, only: list[str]) -> bool:
    """Whether the jobs have the same bits in a worktree of the commit and here."""
    git = ["git", "-C", str(ROOT)]
    asked = subprocess.run(
        [*git, "rev-parse", "--verify", f"{commit}^{{commit}}"], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        print(f"no commit {commit!r} here: {asked.stderr.strip()}")
        return False
    tree = _KEPT / asked.stdout.strip()[:12]
    with tempfile.TemporaryDirectory(prefix="same-bits-") as home:
        old, new, runs = Path(home, "old"), Path(home, "new"), {}
        remove = [*git, "worktree", "remove", "--force", str(tree)]
        if tree.exists():  # a comparison was killed
            subprocess.run(remove, check=True)
        subprocess.run([*git, "worktree", "add", "--quiet", "--force", "--detach", str(tree), commit], check=True)
        try:
            if not (tree / "tests" / "same_bits" / "jobs.py").exists():
                print(f"{commit} has no tests/same_bits: nothing to compare with")
                return False
            runs = {
                "the old commit": (_running(tree, old, only, NUMBA_CACHE_DIR=str(_KEPT / "kernels")), old),
                "this tree": (_running(ROOT, new, only), new),
            }
            ran = _ended(runs)
        finally:
            for process, _ in runs.values():
                process.kill()
                process.wait()
            subprocess.run(remove, check=True)
        return _shown(compare(old, new, only)) and ran


def _shown(found: list[Compared]) -> bool:
    for job in found:
        print(job)
    compared = [job for job in found if not job.missing]
    return bool(compared) and not any(job.differences for job in compared)


def noticed(only: list[str]) -> bool:
    """Whether one changed bit of each job is noticed: of an array in a copy, and of the input of a second run."""
    with tempfile.TemporaryDirectory(prefix="same-bits-") as home:
        plain, flipped, nudged = (Path(home, name) for name in ("plain", "flipped", "nudged"))
        flipped.mkdir()
        runs = {"as it is": (_running(ROOT, plain, only), plain)}
        runs["nudged"] = (_running(ROOT, nudged, only, SAME_BITS_NUDGE="1"), nudged)
        if not _ended(runs):
            return False
        draw = random.Random(0)
        for file in plain.glob("*.npz"):
            with_one_bit_changed(plain, flipped, file.stem, draw.randrange)
        unnoticed = False
        for of_copy, of_run in zip(compare(plain, flipped), compare(plain, nudged), strict=True):
            unnoticed |= len(of_copy.differences) != 1 or not of_run.differences
            print(
                f"{of_run.job}: a bit of a copy: {len(of_copy.differences)} of {of_run.arrays} arrays differ; ", end=""
            )
            print(f"of the input: {len(of_run.differences)}")
        return not unnoticed


def main() -> None:
    """Ends with 1 where anything differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.same_bits", description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("against", "run", "compare", "noticed"):
        command = commands.add_parser(name)
        command.add_argument("--only", default="", help="JOB,JOB: these jobs alone")
        if name == "against":
            command.add_argument("commit")
        if name == "run":
            command.add_argument("--out", type=Path, required=True)
        if name == "compare":
            command.add_argument("old", type=Path)
            command.add_argument("new", type=Path)
    asked = parser.parse_args()
    only = [name for name in asked.only.split(",") if name]
    if asked.command == "run":
        right = run(asked.out, only)
    elif asked.command == "compare":
        right = _shown(compare(asked.old, asked.new, only))
    elif asked.command == "noticed":
        right = noticed(only)
    else:
        right = against(asked.commit, only)
    sys.exit(not right)


if __name__ == "__main__":
    main()
