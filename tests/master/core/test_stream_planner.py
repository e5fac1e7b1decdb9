"""A stream is planned by a thread: what it tells the stream, and where the job ends."""

import queue
import time
from collections.abc import Mapping
from contextlib import nullcontext

import pytest

from elastable.embedding_store.errors import BadInput
from elastable.master.api import JobSpec, Waiting
from elastable.master.core import stream_planner
from elastable.master.core.job_state import JobState
from elastable.master.core.stream_planner import StreamPlanner
from elastable.master.master_options import MasterOptions
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.stream_schedule import StreamPoint, StreamSchedule

JOB = JobSpec(micro_batch_size=2, grads_to_wait=1, epochs=0, train_records=20, stream=True)


class Source:
    """A stream with one partition of ten events."""

    look_s = 3_600.0

    def __init__(self, identity: str = "") -> None:
        self.name, self.looks = identity, 0
        self.told = queue.Queue[Mapping[str, str]]()

    def ahead(self, positions: Mapping[str, str], most: int, until: Mapping[str, str] | None) -> Mapping[str, Waiting]:
        self.looks += 1
        start = int(positions.get("a", "0"))
        return {"a": Waiting(str(start), [str(each) for each in range(start + 1, 11)][:most], start + most < 10)}

    def ends(self, before: float | None = None) -> Mapping[str, str]:
        return {"a": "10"}

    def identity(self) -> str:
        return self.name

    def committed(self, positions: Mapping[str, str]) -> None:
        self.told.put(positions)


def planner_of(state: JobState, source: Source, until: str | None = "end") -> StreamPlanner:
    assert isinstance(state.schedule, StreamSchedule)
    return StreamPlanner(
        state.schedule, state.board, source, MasterOptions(until=until), lambda: state.version, lambda: state.logged,
        nullcontext, lambda: None,
    )  # fmt: skip


def state_of(start: Progress) -> JobState:
    return JobState(JOB, MasterOptions(), start, time.monotonic)


def test_the_stream_is_told_of_versions_that_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_planner, "_EVERY_S", 0.0)
    state, source = state_of(Progress()), Source()

    def told(positions: dict[str, str]) -> bool:
        return any(source.told.get(timeout=60) == positions for _ in range(100))

    def fail(error: BaseException) -> None:
        raise error

    planner = planner_of(state, source)
    assert isinstance(state.schedule, StreamSchedule)
    with planner.running(fail):
        assert told({"a": "0"})
        state.unlogged = lambda: 2
        state.version = 2
        state.schedule.forget(state.version - 1)
        assert told({"a": "2"})
        assert source.told.get(timeout=60) == {"a": "2"}
        state.unlogged = lambda: None
        assert told({"a": "4"})


def test_a_stream_in_which_nothing_waits_is_left_alone_for_a_while() -> None:
    state, source = state_of(Progress()), Source()
    planner = planner_of(state, source, None)
    while planner._look():
        pass
    looks, planned = source.looks, state.schedule.group_count
    assert planned == 5
    assert [planner._look() for _ in range(20)] == [False] * 20
    assert (source.looks, state.schedule.group_count) == (looks, planned)
    source.look_s, planner._look_again = 0.0, 0.0
    assert [planner._look() for _ in range(20)] == [False] * 20
    assert source.looks == looks + 20


@pytest.mark.parametrize("until", [None, "a=8"])
def test_a_job_that_resumes_ends_where_it_was_to_end(until: str | None) -> None:
    first = state_of(Progress())
    assert isinstance(first.schedule, StreamSchedule)
    planner_of(first, Source(), "a=6")
    first.schedule.until = {"a": "6"}
    kept = Progress.from_json(Progress(0, stream=first.schedule.kept(0)).to_json())
    with pytest.raises(BadInput, match=r"ends at --until a=6, and (no --until|--until a=8) is given: give that one"):
        planner_of(state_of(kept), Source(), until)
    planner_of(state_of(kept), Source(), "a=6")


@pytest.mark.parametrize("identity", ["cluster 2", ""])
def test_positions_of_another_stream_are_refused(identity: str) -> None:
    first, failed = state_of(Progress()), queue.Queue[BaseException]()
    assert isinstance(first.schedule, StreamSchedule)
    first.schedule.identity, first.schedule.point = "cluster 1", StreamPoint({"a": "4"}, "a")
    kept = first.schedule.kept(0)
    state = state_of(Progress(0, stream=kept))
    with planner_of(state, Source(identity)).running(failed.put):
        error = failed.get(timeout=60)
    assert isinstance(error, BadInput)
    assert str(error).startswith("the job goes on behind events of cluster 1 in a, and its reader is of ")
    for positions, name in (({"a": "4"}, "cluster 1"), ({"b": "4"}, identity)):
        source = Source(name)
        with planner_of(state_of(Progress(0, stream={**kept, "positions": positions})), source).running(failed.put):
            assert source.told.get(timeout=60)
