"""The plain data of `elastable.master.api` travels as messages and frames, and comes back as it was."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from elastable.embedding_store import errors
from elastable.embedding_store.contract.row_data import FlushStatus
from elastable.embedding_store.errors import BadGradient, BadInput, JobFailed
from elastable.embedding_store.shards.server_contract import RowPush, Slices
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.frames import encode
from elastable.embedding_store.wire.messages.plain_data import from_message, to_message
from elastable.master import api
from elastable.master.rpc import messages
from elastable.master.v1 import master_pb2
from tests.untyped import Keywords

int64 = st.integers(-(2**63), 2**63 - 1)
natural = st.integers(0, 2**63 - 1)
words = st.text(max_size=20)
push_ids = st.builds(api.SyncPushId, int64, int64) | st.builds(api.AsyncPushId, words, int64, int64)
tensors = st.lists(
    npst.arrays(
        st.sampled_from(["float32", "int64", "bool", "uint8", "float16", "float64"]).map(np.dtype),
        npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    max_size=4,
).map(tuple)


@st.composite
def slices(draw: st.DrawFn) -> Slices:
    count, dim = draw(st.integers(0, 6)), draw(st.integers(0, 5))
    return Slices(draw(npst.arrays(np.int64, count)), draw(npst.arrays(np.float32, (count, dim))))


divisors = st.builds(api.Divisor, st.sampled_from(api.DivisorKind), st.floats(0, 1e300))
losses = st.dictionaries(st.integers(0, 2**31 - 1), st.floats(allow_nan=False), max_size=3)
tables = st.dictionaries(words.filter(bool), slices(), max_size=3)
dense_of = tensors.map(lambda found: {2 * place + 1: tensor for place, tensor in enumerate(found)})
parts = st.lists(st.builds(api.GradientPart, divisors, dense_of, tables, losses, tables), max_size=3).map(tuple)


_PLAIN = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(0, 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: natural,
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_STRING: words,
}


def plain_strategies(message: type[Message]) -> Keywords:
    """Values of all fields of a message that are numbers and words: the dataclass has them under the same names."""
    return {
        field.name: st.lists(_PLAIN[field.cpp_type], max_size=3).map(tuple)
        if field.is_repeated
        else _PLAIN[field.cpp_type] | (st.none() if field.has_presence else st.nothing())
        for field in message.DESCRIPTOR.fields
        if field.message_type is None
    }


def assert_same(ours: object, theirs: object) -> None:
    """Equality of nested plain data, arrays compared with dtype, shape and every bit."""
    assert type(ours) is type(theirs)
    if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
    elif isinstance(ours, tuple) and isinstance(theirs, tuple):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif isinstance(ours, dict) and isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, (api.Push, api.DenseSnapshot, api.EvaluationReport, api.GradientPart, Slices)):
        for field in fields(ours):
            assert_same(getattr(ours, field.name), getattr(theirs, field.name))
    else:
        assert ours == theirs


@settings(deadline=None)
@given(
    st.builds(
        api.Push,
        id=push_ids,
        **dict.fromkeys(("dense", "states", "metrics"), tensors),
        slices=tables,
        divisor=st.none() | divisors,
        losses=losses,
        parts=parts,
        **plain_strategies(master_pb2.GradientHeader),
    )
)
def test_a_push_comes_back_as_it_was(push: api.Push) -> None:
    assert_same(messages.push_from_frames(messages.push_frames(push)), push)


@pytest.mark.parametrize(
    ("kind", "header", "others"),
    [
        (api.Push, master_pb2.GradientHeader, {"push", "shared"}),
        (api.EvaluationReport, master_pb2.EvaluationHeader, set()),
        (RowPush, store_pb2.RowPushHeader, {"shared"}),
    ],
)
def test_a_header_has_the_fields_of_what_is_pushed(kind: type[Any], header: type[Message], others: set[str]) -> None:
    named = {field.name for field in fields(kind)} - {"id"}
    assert named == {field.name for field in header.DESCRIPTOR.fields} - others


@settings(deadline=None)
@given(version=natural, variables=tensors, states=tensors, data=st.data())
def test_dense_variables_come_back_as_they_were(
    version: int, variables: tuple[object, ...], states: tuple[object, ...], data: st.DataObject
) -> None:
    names = [data.draw(st.lists(words, min_size=n, max_size=n).map(tuple)) for n in (len(variables), len(states))]
    snapshot = api.DenseSnapshot(version, variables, states, *names, data.draw(st.binary(max_size=9)))  # type: ignore[arg-type, call-arg]
    assert_same(messages.dense_from_frames(messages.dense_frames(snapshot)), snapshot)


def test_a_version_that_is_not_there_yet_is_none() -> None:
    assert messages.dense_from_frames(messages.dense_frames(None)) is None


@settings(deadline=None)
@given(st.builds(api.EvaluationReport, words, natural, natural, natural, tensors))
def test_an_evaluation_comes_back_as_it_was(report: api.EvaluationReport) -> None:
    assert_same(messages.evaluation_from_frames(messages.evaluation_frames(report)), report)


JOBS = [
    api.JobSpec(),
    api.JobSpec(
        job="j", mode="async", micro_batch_size=2, grads_to_wait=3, epochs=4, seed=-5, intra_op_threads=6,
        backend="jax",
        store_url="redis://h", model_file="m.py", model_sha256="ab", offload_above=7, on_worker=("a", "b"),
        train_records=8, validation_records=9, shuffle=False, average="sum", not_finite="skip",
        staleness_bound=0, staleness_modulation="inverse", parts=(3, 5), versions_before=10, parts_before=11,
        micro_batches_before=12, model_config="e30=", records_digest="ef",
    ),
    api.JobSpec(steps_per_epoch=3, initial_epoch=2, evaluation_batch_size=5),
    api.JobSpec(stream=True, epochs=0, train_records=12),
]  # fmt: skip


SPANS = (api.Span("clicks", "0-0/0", "1-0/4", 4), api.Span("more", "", "7", 1))
TASKS = (api.Task(1, api.TaskKind.TRAIN, 2, 3, 4, 5, SPANS), api.Task(6, api.TaskKind.EVALUATE, 7, 8, 9, 10))
PLAIN = [
    *((job, master_pb2.JobDescription) for job in JOBS),
    *((api.Lease(TASKS, finished, TASKS[::-1]), master_pb2.LeaseTasksReply) for finished in (False, True)),
    *((api.PushReply(outcome, "why", 9), master_pb2.ReportGradientReply) for outcome in api.PushOutcome),
]


@pytest.mark.parametrize(("plain", "message"), PLAIN, ids=lambda value: getattr(value, "__name__", ""))
def test_plain_data_comes_back_as_it_was(plain: object, message: type[Message]) -> None:
    assert from_message(type(plain), message.FromString(to_message(message, plain).SerializeToString())) == plain


def test_the_message_of_a_job_has_the_fields_of_a_job() -> None:
    message = {field.name for field in master_pb2.JobDescription.DESCRIPTOR.fields}
    assert message == {field.name for field in fields(api.JobSpec)}
    for name in message:
        assert len({getattr(job, name) for job in JOBS}) > 1, f"{name}: a field that is never tested"


def test_a_status_comes_back_as_it_was() -> None:
    workers = (api.WorkerStatus(api.WorkerIdentity("a", "h", 3), 4, 5), api.WorkerStatus(api.WorkerIdentity("b"), 0, 0))
    refusals = (api.Refusal(api.WorkerIdentity("", "h", 7), "ModelError", "another file", 3),)
    status = api.JobStatus(
        "j", "training", "sync", 1, 2, 3, 4, 5, {"loss": 0.5, "auc": 0.75}, workers, "memory", refusals
    )
    assert messages.status_from_message(messages.status_to_message(status)) == status
    stopped = replace(status, state="finished", stopped="terminated")
    assert messages.status_from_message(messages.status_to_message(stopped)) == stopped
    streamed = replace(status, stream=api.StreamStatus(7, 0.5, 3, "no broker"))
    assert messages.status_from_message(messages.status_to_message(streamed)) == streamed
    for failure in (None, "redis is away"):
        behind = replace(status, flush=FlushStatus(1, 0, 7, 1 << 40, 3, 0.25, failure))
        assert messages.status_from_message(messages.status_to_message(behind)) == behind


def test_what_a_newer_master_might_say_is_refused_by_number() -> None:
    with pytest.raises(BadInput, match="TaskKind 0 is unknown: known are train, evaluate;"):
        from_message(api.Lease, master_pb2.LeaseTasksReply(tasks=[master_pb2.Task()]))
    with pytest.raises(BadInput, match="PushOutcome 0 is unknown"):
        from_message(api.PushReply, master_pb2.ReportGradientReply())


@pytest.mark.parametrize("name", errors.__all__)
def test_a_failure_of_ours_keeps_its_class(name: str) -> None:
    failure = messages.failure_from_message(master_pb2.ReportFailureRequest(error=name, message="why"))
    assert type(failure) is getattr(errors, name)
    assert str(failure) == "why"


def test_a_foreign_failure_says_its_class() -> None:
    failure = messages.failure_from_message(master_pb2.ReportFailureRequest(error="ZeroDivisionError", message="why"))
    assert type(failure) is JobFailed
    assert str(failure) == "ZeroDivisionError: why"


ROWS = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (Slices(np.zeros(2, np.int32), ROWS), "indices must be int64 .* got int32"),
        (Slices(np.zeros((2, 1), np.int64), ROWS), r"indices must be int64 of one dimension, got int64 \[2, 1\]"),
        (Slices(np.zeros(2, np.int64), ROWS.astype(np.float64)), "values must be float32 .* got float64"),
        (Slices(np.zeros(3, np.int64), ROWS), r"float32 \[3, dim\], got float32 \[2, 3\]"),
        (Slices(np.zeros(2, np.int64), ROWS[0]), r"got float32 \[3\]"),
    ],
)
def test_a_gradient_that_the_wire_cannot_carry_is_refused_by_table(gradient: Slices, message: str) -> None:
    with pytest.raises(BadGradient, match=message) as caught:
        messages.push_frames(api.Push(api.SyncPushId(0, 0), 1, slices={"users": gradient}))
    assert "table 'users'" in str(caught.value)


def test_a_dtype_that_the_wire_does_not_know_is_refused() -> None:
    with pytest.raises(BadInput, match="complex64"):
        messages.push_frames(api.Push(api.SyncPushId(0, 0), 1, dense=(np.zeros(3, np.complex64),)))


SYNC = master_pb2.PushId(sync_id=master_pb2.SyncPushId())
HEADER = master_pb2.GradientHeader
SLICES = master_pb2.SlicesEntry
TENSOR = master_pb2.TensorEntry
PART = master_pb2.GradientPart
SUM = master_pb2.Divisor(kind=master_pb2.Divisor.KIND_NOTHING)


@pytest.mark.parametrize(
    ("header", "body", "message"),
    [
        (HEADER(), 0, "no PushId"),
        (HEADER(push=SYNC, dense=[TENSOR(dtype="object")]), 0, "dense gradient 0 has dtype 'object'"),
        (HEADER(push=SYNC, dense=[TENSOR(dtype="float32", shape=[-2])]), 0, "negative"),
        (HEADER(push=SYNC, states=[TENSOR(dtype="float32", shape=[2**40])]), 0, "state 0"),
        (HEADER(push=SYNC, metrics=[TENSOR(dtype="float32", shape=[2])]), 7, "7 of the 8 bytes"),
        (HEADER(push=SYNC, slices=[SLICES(table="t", count=2, dim=-1)]), 16, "values of table 't' has a negative size"),
        (HEADER(push=SYNC, slices=[SLICES(table="t")] * 2), 0, "twice"),
        (HEADER(push=SYNC, divisor=master_pb2.Divisor()), 0, "Divisor.Kind 0 is unknown"),
        (HEADER(push=SYNC, parts=[PART(divisor=None)]), 0, "Divisor.Kind 0 is unknown"),
        (HEADER(push=SYNC, parts=[PART(divisor=SUM, places=[1])]), 0, "0 gradients for the places"),
        (
            HEADER(push=SYNC, parts=[PART(divisor=SUM, places=[1, 1], dense=[TENSOR(dtype="bool", shape=[0])] * 2)]),
            0,
            "name each place once",
        ),
        (HEADER(push=SYNC, parts=[PART(divisor=SUM, slices=[SLICES()] * 2)]), 0, "twice"),
        (HEADER(push=SYNC, parts=[PART(divisor=SUM, dense=[TENSOR(dtype="bool", shape=[9])])]), 3, "3 of the 9 bytes"),
        (HEADER(push=SYNC, losses=master_pb2.Losses(places=[0])), 0, "0 metrics for the places"),
    ],
)
def test_a_push_that_cannot_be_is_refused(header: master_pb2.GradientHeader, body: int, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        messages.push_from_frames(encode(header.SerializeToString(), [np.zeros(body, np.uint8)]))


def test_what_others_say_is_made_fit_for_terminals_and_logs() -> None:
    failure = master_pb2.ReportFailureRequest(error="Odd\x1b[2J\n", message="first\nINFO forged \x07")
    assert str(messages.failure_from_message(failure)) == r"Odd\x1b[2J\n: first" + "\n    " + r"INFO forged \x07"
    reply = master_pb2.GetStatusReply(job="j\n", state="\x1bs", store="a\x9bb", metrics={"m\r": 1.0})
    reply.workers.add(incarnation="i", host="h\x1b[31m")
    reply.refusals.add(host="h\n", error="e", message="one\ntwo")
    status = messages.status_from_message(reply)
    assert (status.job, status.state, status.store, dict(status.metrics)) == (
        r"j\n",
        r"\x1bs",
        r"a\x9bb",
        {r"m\r": 1.0},
    )
    assert status.workers[0].identity.host == r"h\x1b[31m"
    assert (status.refusals[0].worker.host, status.refusals[0].message) == (r"h\n", "one\n    two")
