"""Sizings: enough processes for what is asked, no more than needed, and refused where none are enough."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from elastable.embedding_store.errors import BadInput
from elastable.planning.calibration import INSTALLED, Calibration
from elastable.planning.sizing import BUSY, JobShape, fastest, pace, sized

GIB = 1 << 30
JOB = JobShape(examples=2_048, rows=50_000, values=800_000, dense=140_000, step_s=0.025, table_bytes=GIB)


@pytest.fixture(scope="module")
def costs() -> Calibration:
    return Calibration.read()


def test_the_calibration_that_is_installed_has_costs_of_all_processes(costs: Calibration) -> None:
    for name in ("worker_version", "store_value", "master_version", "redis_value"):
        assert 0 < getattr(costs, name) < 1
    assert 0 < costs.lookup_share + costs.push_share < 1


@pytest.mark.parametrize("asked", [10_000, 60_000, 200_000])
def test_it_is_enough_and_one_worker_less_is_not(costs: Calibration, asked: int) -> None:
    found = sized(JOB, costs, asked, 16 * GIB)
    assert found.examples_per_s >= asked
    assert found.pace.store_s <= BUSY * found.pace.version_s
    if found.pace.workers > 1:
        fewer = pace(JOB, costs, found.pace.workers - 1, found.pace.stores)
        assert JOB.examples * fewer.workers / fewer.version_s < asked


def test_rows_beyond_the_memory_of_a_server_need_more_servers(costs: Calibration) -> None:
    assert sized(JOB, costs, 10_000, 16 * GIB).pace.stores == 1
    large = replace(JOB, table_bytes=100 * GIB)
    found = sized(large, costs, 10_000, 16 * GIB)
    assert found.pace.stores == 7
    assert 100 * GIB / 7 < found.store_bytes <= 16 * GIB


def test_rows_that_fit_into_no_number_of_servers_are_refused(costs: Calibration) -> None:
    with pytest.raises(BadInput, match=r"10,000\.0 GiB of rows need 625 store servers of 16\.0 GiB each"):
        sized(replace(JOB, table_bytes=10_000 * GIB), costs, 10_000, 16 * GIB)


def test_a_pace_out_of_reach_is_refused_with_the_fastest_job_and_its_limit(costs: Calibration) -> None:
    best = fastest(JOB, costs, 16 * GIB)
    assert sized(JOB, costs, 0.99 * best.examples_per_s, 16 * GIB).examples_per_s >= 0.99 * best.examples_per_s
    with pytest.raises(BadInput, match=rf"out of reach.*{best.pace.workers} workers.*limited by {best.limit}"):
        sized(JOB, costs, 2 * best.examples_per_s, 16 * GIB)


def test_a_large_dense_part_makes_the_master_the_limit(costs: Calibration) -> None:
    few = pace(replace(JOB, dense=10_000_000), costs, 7, 4)
    assert few.master_s > 0.5 * few.version_s > few.store_s


def test_many_workers_have_store_servers_sum_a_large_dense_part(costs: Calibration) -> None:
    job = replace(JOB, dense=10_000_000)
    few, many = (pace(job, costs, workers, 16) for workers in (7, 56))
    assert many.master_s < few.master_s
    assert many.version_s < 3 * few.version_s
    assert fastest(job, costs, 16 * GIB).limit == "store servers"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"wait": -1.0}, "wait is -1.0"),
        ({"store_row": "fast"}, "store_row is 'fast'"),
        ({"lookup_share": 0.8, "push_share": 0.8}, "together more than 1"),
        ({"speed": 1.0}, r"\['speed'\] are unknown"),
    ],
)
def test_a_calibration_that_cannot_be_is_refused(
    tmp_path: Path, costs: Calibration, changed: dict[str, object], message: str
) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({**asdict(costs), **changed}))
    with pytest.raises(BadInput, match=message):
        Calibration.read(file)


def test_a_calibration_that_is_not_there_or_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        Calibration.read(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("fast")
    with pytest.raises(BadInput, match="is not JSON"):
        Calibration.read(tmp_path / "text.json")
    assert Calibration.read(INSTALLED) == Calibration.read()
