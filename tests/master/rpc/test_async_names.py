"""Asynchronous pushes whose sequence, age or values cannot be: each is answered by what it is, and changes nothing."""

from contextlib import ExitStack
from itertools import product

import grpc
import numpy as np
import pytest

from elastable.embedding_store.wire.channels.status_codes import ERROR_KEY
from elastable.master.v1 import master_pb2, master_pb2_grpc
from tests.master.rpc.test_identities import ASYNC, SECRET, SESSION_KEY, Served, serve

ACCEPTED, DUPLICATE, STALE = (
    master_pb2.PUSH_OUTCOME_ACCEPTED,
    master_pb2.PUSH_OUTCOME_DUPLICATE,
    master_pb2.PUSH_OUTCOME_STALE,
)


class Client:
    """A client without tasks, of the .proto files alone."""

    def __init__(self, held: ExitStack, served: Served) -> None:
        self._served = served
        self._stub = master_pb2_grpc.MasterStub(held.enter_context(grpc.insecure_channel(served.address)))
        events = self._stub.Join(master_pb2.JoinRequest(incarnation="c"), metadata=((SESSION_KEY, SECRET),))
        held.callback(events.cancel)
        next(iter(events))

    def push(
        self, sequence: int, micro_batch: int = -1, on: int | None = None, values: tuple[float, ...] = (-1.0,)
    ) -> master_pb2.ReportGradientReply:
        name = master_pb2.AsyncPushId(incarnation="c", sequence=sequence, micro_batch=micro_batch)
        header = master_pb2.GradientHeader(push=master_pb2.PushId(async_id=name), records=2, computed_on=on)
        header.slices.add(table="seen", count=len(values), dim=1)
        body = np.zeros(len(values), "<i8").tobytes() + np.array(values, "<f4").tobytes()
        frame = master_pb2.GradientFrame(header=header, body=body)
        return self._stub.ReportGradient(iter([frame]), timeout=60, metadata=((SESSION_KEY, SECRET),))

    def refused(self, *what: object, **more: object) -> str:
        """The name of the error and what it says; nothing has changed."""
        before = self.row(), self._served.master.status().version
        with pytest.raises(grpc.RpcError) as caught:
            self.push(*what, **more)  # type: ignore[arg-type]
        assert (self.row(), self._served.master.status().version) == before
        assert isinstance(caught.value, grpc.Call)
        return f"{dict(caught.value.trailing_metadata() or ())[ERROR_KEY]}: {caught.value.details()}"

    def row(self) -> float:
        return float(self._served.store.lookup({"seen": np.zeros(1, np.int64)})["seen"][0, 0])


@pytest.fixture
def client(held: ExitStack) -> Client:
    return Client(held, serve(held, ASYNC))


def test_a_sequence_that_was_never_counted_is_no_duplicate(client: Client) -> None:
    assert [client.push(number).outcome for number in (2, 5)] == [ACCEPTED, ACCEPTED]
    for never, counted in ((3, False), (2, True), (1, False)):
        reply = client.push(never)
        assert (reply.outcome, reply.version) == (STALE, 2), counted
        assert f"push {never} of 'c' comes after its push 5" in reply.reason
    assert client.push(5).outcome == DUPLICATE
    assert client.push(6).outcome == ACCEPTED
    assert client.row() == 3.0


def test_a_sequence_that_nobody_gets_to_is_refused(client: Client) -> None:
    for sequence, micro_batch in product((0, -1, -(2**63), 2**32 + 1, 2**53, 2**63 - 1), (-1, 0)):
        said = client.refused(sequence, micro_batch)
        assert said.startswith(f"BadInput: push {sequence} of 'c', whose last one was 0")
    assert client.push(1).outcome == ACCEPTED, "and the right one is not in its way"


def test_a_micro_batch_that_is_neither_a_task_nor_none_is_refused(client: Client) -> None:
    assert client.refused(1, -2).startswith("BadInput: micro-batch -2: a push that is of no task says -1")


def test_an_age_beyond_the_first_version_is_refused(client: Client) -> None:
    for on in (-1, -(2**62)):
        assert client.refused(1, on=on).startswith(f"BadInput: push computed on version {on}: the first version is 0")
    assert client.refused(1, on=1).startswith("FutureVersion: push computed on version 1, which is not there")
    assert client.push(1, on=0).outcome == ACCEPTED


def test_finite_values_whose_sum_is_not_change_nothing(client: Client) -> None:
    said = client.refused(1, values=(3e38, 3e38))
    assert said.startswith("NotFinite: table 'seen': the summed gradient of id 0")
    assert client.push(1, values=(3e38, -3e38)).outcome == ACCEPTED
    assert client.row() == 0.0
