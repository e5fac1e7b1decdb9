"""The example of training over replicas, by real processes: one model, shared state, and on from its checkpoint."""

import os
import re
from pathlib import Path

from tests.preloaded.client import run_preloaded

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "replicas" / "train.py"


def run(replicas: int, *options: str) -> str:
    """What the example prints on so many replicas."""
    words = [str(EXAMPLE), "--width", "96", *options]
    if replicas > 1:
        words = ["-m", "elastable", "replicas", "-n", str(replicas), *words]
    ran = run_preloaded(words, ROOT, {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_two_processes_share_one_model_and_one_goes_on_with_it(tmp_path: Path) -> None:
    text = run(2, "--epochs", "1", "--checkpoints", str(tmp_path))
    assert "from the beginning" in text
    ended = re.findall(r"rank (\d): loss (\S+), accuracy ([\d.]+), weights (\w+)", text)
    assert sorted(line[0] for line in ended) == ["0", "1"]
    assert len({line[1:] for line in ended}) == 1
    # Adam's slots of the kernel of 96 x 96 are in halves; the rest, below the threshold, is not.
    held = re.findall(r"rank \d of 2: ([\d,]+) of ([\d,]+) bytes of optimizer state, ([\d,]+) of ([\d,]+) bytes", text)
    numbers = [[int(number.replace(",", "")) for number in line] for line in held]
    assert numbers == [[whole - 96 * 96 * 4, whole, rest - 96 * 96 * 2, rest] for _, whole, _, rest in numbers]
    (again,) = re.findall(
        r"rank 0: loss (\S+), accuracy ([\d.]+)", run(1, "--epochs", "1", "--checkpoints", str(tmp_path))
    )
    assert again == ended[0][1:3]
