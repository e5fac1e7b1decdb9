"""The records of the click model are drawn as they say, and programs that count steps are listened to."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.click_job.contenders import StepCounter
from benchmarks.click_job.draws import IDS, RECORDS, batches
from benchmarks.click_job.sizes import BATCH, FEATURES

ROWS = 50_000
COUNTS = """
import sys
print("what a library prints")
for line in sys.stdin:
    print('{"steps": %d, "seconds": %g}' % (2 * int(line), 0.5 * int(line)), flush=True)
"""


@pytest.mark.parametrize("kind", IDS)
def test_batches_are_of_the_table_and_the_same_each_time(kind: str) -> None:
    ids, clicks = batches(ROWS, kind)
    assert ids.shape == (RECORDS // BATCH, BATCH, FEATURES)
    assert clicks.shape == (RECORDS // BATCH, BATCH, 1)
    assert (ids.min(), ids.max()) == (0, ROWS - 1)
    batches.cache_clear()
    np.testing.assert_array_equal(batches(ROWS, kind)[0], ids)


def test_larger_batches_have_the_same_records() -> None:
    ids, clicks = batches(ROWS)
    larger, clicks_of_larger = batches(ROWS, batch=16 * BATCH)
    assert larger.shape == (RECORDS // BATCH // 16, 16 * BATCH, FEATURES)
    np.testing.assert_array_equal(larger.reshape(-1, FEATURES), ids.reshape(-1, FEATURES))
    np.testing.assert_array_equal(clicks_of_larger.ravel(), clicks.ravel())


def test_ids_are_skewed_uniform_or_each_once() -> None:
    most = {kind: np.bincount(batches(ROWS, kind)[0].ravel()).max() / (RECORDS * FEATURES) for kind in IDS}
    shares = np.arange(1, ROWS + 1) ** -1.05
    assert most["zipf"] == pytest.approx(1 / shares.sum(), rel=0.02)
    assert most["uniform"] < 2 / ROWS
    first = batches(ROWS, "cold")[0].ravel()[:ROWS]
    np.testing.assert_array_equal(np.sort(first), np.arange(ROWS))


def test_a_program_that_counts_steps_gives_examples_a_second(tmp_path: Path) -> None:
    with StepCounter([sys.executable, "-c", COUNTS], dict(os.environ), tmp_path / "log") as counter:
        counter.start()
        counter.warm_up()
        assert counter.examples_per_second(1.0) == BATCH / 0.25


def test_a_program_that_ends_is_named_with_what_it_said(tmp_path: Path) -> None:
    fails = [sys.executable, "-c", "import sys; sys.exit('no such table')"]
    with StepCounter(fails, dict(os.environ), tmp_path / "log") as counter:
        counter.start()
        with pytest.raises(RuntimeError, match="no such table"):
            counter.warm_up()
