"""Roles of callers, and the least role that each call needs: the one table of who may do what."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType

__all__ = ["LEAST_ROLE", "Role", "least_role"]

_STORE = "/elastable.embedding_store.v1.EmbeddingStore/"
_SERVER = "/elastable.embedding_store.v1.StoreServer/"
_MASTER = "/elastable.master.v1.Master/"
_REFLECTION = "/grpc.reflection."


class Role(IntEnum):
    """What a caller may do; each role may do what those before it may."""

    READER = 1
    """Reads tables, rows, versions, pins and the status of a job."""
    WORKER = 2
    """Takes part in a job; creates tables and changes rows of a server that allows writing."""
    ADMINISTRATOR = 3
    """Deletes rows and tables, sets versions back, stops a job."""

    @property
    def word(self) -> str:
        """As it is written in settings and messages: "reader", "worker" or "administrator"."""
        return self.name.lower()


LEAST_ROLE: Mapping[str, Role] = MappingProxyType(
    {
        f"{service}{call}": role
        for service, role, calls in (
            (
                _STORE,
                Role.READER,
                "ListTables GetVersion Lookup LookupSmall CountRows TableStatistics ReadSightings Scan ReadRows Attach "
                "Pin RenewPin ReleasePin ListPins",
            ),
            (_STORE, Role.WORKER, "CreateTable Commit CommitStaged Put PutSightings"),
            (_STORE, Role.ADMINISTRATOR, "Delete ClearTable DropTable ResetVersion"),
            (_SERVER, Role.READER, "GetOwner GetShardStatus"),
            (
                _SERVER,
                Role.WORKER,  # all but PushRows for the owner alone, whose claim was an administrator's
                "PushRows Renew Measure OfferRows CommitPushed TakeBack ReadRecord KeepRecord "
                "TakeChanges SaveRows CreateTable Put PutSightings Delete ClearTable DropTable ResetVersion",
            ),
            (_SERVER, Role.ADMINISTRATOR, "Claim"),
            (_MASTER, Role.READER, "GetStatus"),
            (_MASTER, Role.WORKER, "Join LeaseTasks PullDense ReportGradient ReportEvaluation ReportFailure"),
            (_MASTER, Role.ADMINISTRATOR, "StopJob"),
        )
        for call in calls.split()
    }
)
"""Full name of every call of Elastable's services -> the least role that may make it."""


def least_role(method: str) -> Role:
    """The least role for a call; the administrator's where the table does not have it."""
    if method.startswith(_REFLECTION):
        return Role.READER
    return LEAST_ROLE.get(method, Role.ADMINISTRATOR)
