"""Who may call the store servers that a command starts on this machine: the processes of its run, and nobody else."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from elastable.embedding_store.wire.access.credentials import (
    GIVEN_ADMINISTRATOR_TOKEN,
    GIVEN_TOKEN,
    STORES_TOKEN,
    Credentials,
)

__all__ = ["StoreAccess"]

# What the environment says of roles is for servers that outlive a run.
_OTHERS = ("ELASTABLE_TOKEN_FILE", "ELASTABLE_WORKER_TOKEN_FILE", "ELASTABLE_READER_TOKEN_FILE")
_ROLES = "ELASTABLE_CERTIFICATE_ROLES"


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """Tokens for the store servers of one run, made for it whatever else is configured; TLS stays as it is.

    They are passed in environments, which only this user's processes can read: on a command line every user of the
    host would see them.

    Attributes:
        credentials: Of the master as a client of the store servers: their administrator.
        servers: Variables in which the environment of the store servers differs from the master's.
        workers: Likewise, of the run's workers.
    """

    credentials: Credentials
    servers: Mapping[str, str] = field(repr=False)
    workers: Mapping[str, str] = field(repr=False)

    @classmethod
    def for_run(cls, given: Credentials | None = None) -> Self:
        """New tokens.

        Args:
            given: Whose certificates the master shows; None: those of the environment.
        """
        given = Credentials.from_environment() if given is None else given
        administrator, worker = secrets.token_hex(32), secrets.token_hex(32)
        return cls(
            replace(given, token=administrator, worker_token=None, reader_token=None),
            {
                **dict.fromkeys((*_OTHERS, _ROLES), ""),
                GIVEN_ADMINISTRATOR_TOKEN: administrator,
                GIVEN_TOKEN: worker,
            },
            {STORES_TOKEN: worker},
        )
