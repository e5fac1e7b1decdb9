"""A worker's session on the client: a stream, and a thread that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, Thread
from typing import Protocol

import grpc
from google.protobuf.message import DecodeError

from elastable.embedding_store.errors import DeadlineExceeded, ElastableError, StoreFailed, Unavailable
from elastable.master.api import JobSpec
from elastable.master.v1 import master_pb2
from elastable.master.wire.messages import job_from_message

__all__ = ["RemoteSession"]


class SessionCall(Protocol):
    """The call `Join`: its events as bytes."""

    def __iter__(self) -> Iterator[bytes]: ...

    def cancel(self) -> object:
        """Ends the call, and with it the session."""


class RemoteSession:
    """A worker's place in a job; while its stream is open the worker counts as alive.

    Args:
        stream: The call `Join`, just made; its events are bytes yet. (gRPC leaves a call open whose message it
            cannot parse, and a session would last as long.)
        address: Of the master, for messages.
        timeout_s: Seconds to wait for the job's description.

    Raises:
        grpc.RpcError: the stream broke before the description came.
        DeadlineExceeded, Unavailable, BadSpec, StoreFailed: it did not come, or makes no sense.
    """

    def __init__(self, stream: SessionCall, address: str, timeout_s: float) -> None:
        self._stream = stream
        self._address = address
        self._joined = Event()
        self._ended = Event()
        self._job: JobSpec | None = None
        self._finished = ""
        self._broken: Exception | None = None
        # gRPC ends a stream at its deadline, so the session has none, and the
        # wait for its first event is our own.
        self._reader = Thread(target=self._read, name="master-session", daemon=True)
        self._reader.start()
        if not self._joined.wait(timeout_s):
            self.close()
            raise DeadlineExceeded(f"{address} did not describe its job within {timeout_s:.3g} s")
        if self._job is None:
            raise self._broken or Unavailable(f"{address} ended the session before it described its job")

    @property
    def job(self) -> JobSpec:
        """The job joined."""
        assert self._job is not None, "made only once the description has come"
        return self._job

    @property
    def finished(self) -> str:
        """Why the job ended; "" while it lasts."""
        return self._finished

    def alive(self) -> bool:
        """False once the connection to the master is gone."""
        return not self._ended.is_set()

    def close(self) -> None:
        """Leaves: the worker's leases are free for others. Closing twice is harmless."""
        self._stream.cancel()
        self._reader.join(timeout=5.0)

    def _read(self) -> None:
        try:
            for event in self._stream:
                self._handle(master_pb2.JobEvent.FromString(event))
        except DecodeError as error:
            self._broken = StoreFailed(f"{self._address} sent a job description that cannot be read: {error}")
        except (grpc.RpcError, ElastableError) as error:
            self._broken = error
        finally:
            self._stream.cancel()  # where it ended here and not there
            self._ended.set()
            self._joined.set()

    def _handle(self, event: master_pb2.JobEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "job":
            self._job = job_from_message(event.job)
            self._joined.set()
        elif kind == "finished":
            self._finished = event.finished
