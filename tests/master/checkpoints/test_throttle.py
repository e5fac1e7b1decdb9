"""A writer beside training takes an eighth of a core where cores are short, and does not wait where they are not."""

from __future__ import annotations

import time

import pytest

from elastable.master.checkpoints.storage.tensor_file import Throttle


def compute(seconds: float) -> None:
    """Keeps a core busy for so long, by the thread's own clock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("short", [True, False])
def test_pauses_belong_to_work_and_to_a_busy_machine(short: bool) -> None:
    pauses: list[float] = []
    restraint = Throttle(lambda: short, pauses.append)
    for seconds in (0.01, 0.03):
        with restraint.working():
            compute(seconds)
    if not short:
        assert pauses == []
        return
    assert len(pauses) == 2
    assert pauses[0] >= 0.01 * 7
    assert pauses[1] >= 0.03 * 7
