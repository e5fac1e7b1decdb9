"""The plan of a stream: every event in one micro-batch, cut by position alone, whenever it is looked at or resumed."""

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import elastable as et
from elastable.embedding_store.errors import BadInput, BadSpec, CheckpointError
from elastable.master.api import JobSpec, Span, Waiting
from elastable.master.master_options import Until
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.stream_schedule import Cut, StreamPoint, StreamSchedule


def job_of(size: int = 3, group: int = 2, epochs: int = 0, steps: int = 4, mode: str = "sync") -> JobSpec:
    records = steps * group * size
    return JobSpec(
        micro_batch_size=size, grads_to_wait=group, epochs=epochs, train_records=records, stream=True, mode=mode
    )


def waiting(counts: Mapping[str, int], positions: Mapping[str, str], most: int) -> dict[str, Waiting]:
    """Of partitions whose positions are the numbers of their events, from 1."""
    found = {}
    for name, count in counts.items():
        first = int(positions.get(name, "0"))
        stops = [str(number) for number in range(first + 1, min(count, first + most) + 1)]
        found[name] = Waiting(str(first), stops, first + most < count)
    return found


def planned(schedule: StreamSchedule, counts: Mapping[str, int], ahead: int = 16, version: int = 0) -> list[Cut]:
    """All versions of a stream that ends, planned by so many a look."""
    schedule.until = {name: str(count) for name, count in counts.items()}
    cuts: list[Cut] = []
    while not schedule.complete:
        most = schedule.wanted(version, ahead)
        assert schedule.plan(waiting(counts, schedule.point.positions, most), 0.0, 1e9)
        for each in range(version, schedule.group_count):
            cuts.append(tuple(task.spans for task in schedule.tasks(each)))
        version = schedule.group_count
    return cuts


def test_files_are_cut_alike_wherever_a_look_begins(tmp_path: Path) -> None:
    """A folder lists as many records as it is asked for, and no later files: so a job that is resumed looks alike."""
    for name in "abcd":
        pq.write_table(pa.table({"x": [1.0] * 20}), tmp_path / f"{name}.parquet")
    folder = et.FolderReader(tmp_path)

    def cut(begin: StreamSchedule) -> tuple[list[Span], list[tuple[int, StreamPoint]]]:
        spans, points = list[Span](), list[tuple[int, StreamPoint]]()
        while not begin.complete:
            begin.until, version = folder.ends(), begin.group_count
            begin.plan(folder.ahead(begin.point.positions, begin.wanted(version, 16), begin.until), 0.0, 1e9)
            for each in range(version, begin.group_count):
                points.append((len(spans), begin._points[each]))
                spans += [span for task in begin.tasks(each) for span in task.spans]
        return spans, points

    whole, points = cut(StreamSchedule(job_of(4, 2)))
    assert sum(span.events for span in whole) == 80
    for place, point in points:
        resumed = StreamSchedule(job_of(4, 2))
        resumed.point = point
        assert cut(resumed)[0] == whole[place:]


partitions = st.dictionaries(st.sampled_from([str(number) for number in range(12)]), st.integers(0, 40), min_size=1)


@given(partitions, st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
def test_every_event_is_in_one_micro_batch_however_often_one_looks(
    counts: dict[str, int], size: int, group: int, ahead: int
) -> None:
    cuts = planned(StreamSchedule(job_of(size, group)), counts)
    assert planned(StreamSchedule(job_of(size, group)), counts, ahead) == cuts
    ends = dict.fromkeys(counts, 0)
    for number, cut in enumerate(cuts):
        for spans in cut:
            for span in spans:
                assert int(span.start) == ends[span.partition]
                ends[span.partition] = int(span.stop)
                assert int(span.stop) - int(span.start) == span.events > 0
            last = number == len(cuts) - 1 and spans == cut[-1]
            assert sum(span.events for span in spans) == size or last
        assert len(cut) == group or number == len(cuts) - 1
    assert ends == counts


@given(partitions, st.integers(1, 5), st.data())
def test_a_job_that_resumes_has_the_same_cuts(counts: dict[str, int], size: int, data: st.DataObject) -> None:
    whole = StreamSchedule(job_of(size))
    cuts = planned(whole, counts)
    version = data.draw(st.integers(0, len(cuts)))
    kept = json.loads(Progress(version, stream=whole.kept(version)).to_json())["stream"]
    resumed = StreamSchedule(job_of(size), kept, version)
    known = [tuple(task.spans for task in resumed.tasks(each)) for each in range(version, resumed.group_count)]
    assert known == cuts[version:]
    assert known + planned(resumed, counts, version=resumed.group_count) == cuts[version:]


def test_partitions_take_turns_and_a_small_one_is_not_left_behind() -> None:
    cuts = planned(StreamSchedule(job_of(2, 1)), {"9": 8, "10": 1, "11": 4})
    turns = [[(span.partition, span.events) for span in cut[0]] for cut in cuts]
    assert turns == [
        [("9", 2)], [("10", 1), ("11", 1)], [("9", 2)], [("11", 2)], [("9", 2)], [("11", 1), ("9", 1)], [("9", 1)],
    ]  # fmt: skip
    alike = planned(StreamSchedule(job_of(1, 1)), {"a1": 2, "a01": 2})
    assert [cut[0][0].partition for cut in alike] == ["a01", "a1", "a01", "a1"]


def test_too_few_events_wait_for_others_and_then_make_a_smaller_version() -> None:
    schedule = StreamSchedule(job_of(3, 2))
    assert not schedule.plan(waiting({"a": 4}, {}, 6), now=10.0, linger_s=5.0)
    assert not schedule.plan(waiting({"a": 4}, {}, 6), now=14.9, linger_s=5.0)
    assert schedule.plan(waiting({"a": 4}, {}, 6), now=15.0, linger_s=5.0)
    assert [task.stop for task in schedule.tasks(0)] == [3, 1]
    assert schedule.plan(waiting({"a": 10}, {"a": "4"}, 6), now=15.0, linger_s=5.0)
    assert not schedule.complete
    numbers = [task.micro_batch for version in range(schedule.group_count) for task in schedule.tasks(version)]
    assert numbers == [0, 1, 2, 3]
    schedule = StreamSchedule(job_of(3, 2))
    assert schedule.plan(waiting({"a": 2}, {}, 6), now=1.0, linger_s=0.0)
    assert (list(schedule.micro_batches(0)), list(schedule.micro_batches(1))) == ([0], [2, 3])


def test_a_partition_that_was_seen_keeps_its_beginning() -> None:
    """So that events of it which are trimmed before the first is trained are missed."""
    schedule = StreamSchedule(job_of())
    schedule.plan({"a": Waiting("17")}, 0.0, 1.0)
    assert schedule.kept(0)["positions"] == {"a": "17"}


def test_epochs_end_a_job_and_versions_of_bad_events_count() -> None:
    schedule = StreamSchedule(job_of(1, 1, epochs=2, steps=3))
    cuts = planned(schedule, {"a": 100}, 2)
    assert (len(cuts), schedule.versions_total, schedule.finished(6), schedule.finished(5)) == (6, 6, True, False)
    assert (schedule.pass_over(1, 3), schedule.pass_over(2, 4), schedule.pass_over(2, 4)) == (3, 7, 7)
    assert (schedule.kept(1)["bad_events"], schedule.kept(2)["bad_events"]) == (3, 7)
    schedule.forget(2)
    assert (schedule.kept(2)["bad_events"], schedule.bad_events) == (7, 7)
    assert not StreamSchedule(job_of()).finished(10**6)


@pytest.mark.parametrize(
    "kept",
    [
        {"positions": 3},
        {"identity": "", "positions": {}, "last": "", "until": None, "bad_events": 0, "cuts": [[[{"a": 1}]]]},
    ],
)
def test_a_malformed_place_is_refused(kept: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="is no place in a stream"):
        StreamSchedule(job_of(), kept)


def test_a_stream_is_for_synchronous_jobs() -> None:
    with pytest.raises(BadSpec, match="mode sync"):
        job_of(group=1, mode="async")


def test_where_a_stream_ends() -> None:
    assert Until.parse(None) == Until()
    assert Until.parse("end").end
    assert Until.parse("a:b=1-0,c=2").positions == {"a:b": "1-0", "c": "2"}
    assert Until.parse("2026-11-28T06:00:00+02:00").time == Until.parse("2026-11-28T04:00Z").time
    assert Until.parse("2026-11-28T04:00").time == Until.parse("2026-11-28T04:00Z").time
    for text in ("tomorrow", "a=", "=3", ""):
        with pytest.raises(BadInput, match="write end, a time such as"):
            Until.parse(text)
