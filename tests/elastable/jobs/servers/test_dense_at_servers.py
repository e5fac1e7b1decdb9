"""Where a job's dense gradients are summed, by its options, its store servers and the size of its dense part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastable.embedding_store.errors import BadInput
from elastable.jobs.options import JobOptions
from elastable.jobs.prepare import where_dense_is_summed
from elastable.master.api import JobSpec
from tests.elastable.processes import CLICK_JOB

OPTIONS = JobOptions(CLICK_JOB, store="servers:10.0.0.1:50061,10.0.0.2:50061")
JOB, LARGE, SMALL = JobSpec(grads_to_wait=16), 8 << 20, (8 << 20) - 1


@pytest.mark.parametrize(
    ("changes", "job", "size", "where"),
    [
        ({}, JOB, LARGE, "servers"),
        ({}, JOB, SMALL, "master"),
        ({}, replace(JOB, grads_to_wait=15), LARGE, "master"),
        ({}, replace(JOB, grads_to_wait=8), 2 * LARGE, "servers"),
        ({}, replace(JOB, grads_to_wait=7), 1 << 30, "master"),
        ({}, JobSpec(mode="async", grads_to_wait=9), 1 << 30, "master"),
        ({"store": "memory"}, JOB, LARGE, "master"),
        ({"store": "grpc://10.0.0.1:50051"}, JOB, LARGE, "master"),
        ({"store": "servers:127.0.0.1:50061,localhost:50062"}, JOB, LARGE, "master"),
        ({"store": "servers:127.0.0.1:50061,10.0.0.2:50062"}, JOB, LARGE, "servers"),
        ({"dense_at": "master"}, JOB, LARGE, "master"),
        ({"dense_at": "servers"}, JOB, SMALL, "servers"),
        ({"dense_at": "servers", "store": "servers:127.0.0.1:50061"}, JOB, 0, "servers"),
    ],
)
def test_large_dense_parts_are_summed_at_servers_of_other_hosts(
    changes: dict[str, str], job: JobSpec, size: int, where: str
) -> None:
    assert where_dense_is_summed(replace(OPTIONS, **changes), job, size) == where  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "job", "told"),
    [
        ({"store": "memory"}, JOB, "--mode sync and rows in memory: only store servers"),
        ({}, JobSpec(mode="async"), "--dense-at servers with --mode async"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, str], job: JobSpec, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        where_dense_is_summed(replace(OPTIONS, dense_at="servers", **changes), job, LARGE)  # type: ignore[arg-type]
