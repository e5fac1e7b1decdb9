"""Who may call a job's master: the credentials of its server, and those of the workers that it starts."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from elastable.embedding_store.support.address import Address
from elastable.embedding_store.wire.access.credentials import GIVEN_TOKEN, Credentials, Role
from elastable.jobs.options import JobOptions

__all__ = ["JobAccess"]

_OTHER_TOKENS = ("ELASTABLE_TOKEN_FILE", "ELASTABLE_READER_TOKEN_FILE")


@dataclass(frozen=True, slots=True)
class JobAccess:
    """Credentials of a job's processes.

    Workers that the command itself starts have a separate token, made for this job, in their environment. Where
    nobody set a token, they are then the only workers: other callers of this host may look on. Workers that come from
    elsewhere, to `elastable master`, have the token that was set, or need none.

    Attributes:
        credentials: Of the master's server.
        anonymous: The role of callers who show no token; None: as the credentials say (`GrpcServer`).
        environment: Variables in which the environment of local workers differs from the master's.
    """

    credentials: Credentials
    anonymous: Role | None
    environment: Mapping[str, str]

    @classmethod
    def of(cls, options: JobOptions, given: Credentials | None = None) -> Self:
        """For a job that is about to begin.

        Args:
            options: Of the job.
            given: Credentials; None: those of the environment.

        Raises:
            BadInput: server or local workers cannot have such credentials.
        """
        credentials, where = given or Credentials.from_environment(), Address.parse(options.listen)
        credentials.for_server(where, options.insecure)
        if options.local_workers:
            credentials.for_client(where.for_this_host())
        if not options.local_workers or not _may_have_own(credentials, where, _rows_elsewhere(options)):
            return cls(credentials, None, {})
        without = dict.fromkeys(_OTHER_TOKENS, "")
        if credentials.worker_token is not None:
            return cls(credentials, None, without)
        token = secrets.token_hex(32)
        onlookers = None if credentials.tokens else Role.READER
        return cls(replace(credentials, worker_token=token), onlookers, {**without, GIVEN_TOKEN: token})


def _rows_elsewhere(options: JobOptions) -> bool:
    """Whether workers look rows up at servers that others started; those of this run have tokens of their own."""
    return (bool(options.stores) and not options.local_stores) or options.store.startswith("grpc://")


def _may_have_own(credentials: Credentials, where: Address, rows_elsewhere: bool) -> bool:
    """Whether local workers can do with the workers' token alone."""
    if credentials.tokens:
        # Rows at another server are looked up there, and that server knows nothing of a token made here.
        return credentials.worker_token is not None or not rows_elsewhere
    # Certificates say who is a worker; and so does whoever opens a port in plain text to others than this host.
    return credentials.ca is None and credentials.certificate is None and where.is_loopback
