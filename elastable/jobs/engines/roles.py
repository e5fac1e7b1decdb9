"""The processes of a job by their roles: what each runs, and who may call it."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from elastable.embedding_store.option import command_words
from elastable.embedding_store.support.store_url import url_of_server
from elastable.embedding_store.wire.access.credentials import (
    GIVEN_ADMINISTRATOR_TOKEN,
    GIVEN_TOKEN,
    STORES_TOKEN,
    Credentials,
)
from elastable.jobs.engines.engine import Command, Engine, Processes
from elastable.jobs.options import JobOptions, StoreServerOptions, WorkerOptions

_WORKERS_LEAVE_S, _WORKERS_END_S = 20.0, 5.0
_STORES_LEAVE_S, _STORES_END_S = 0.0, 30.0  # they write what their stores keep
_FOR_STORES = ("store", "transport", "insecure", "client_calls", "client_bytes", "client_rate")


def store_options(options: JobOptions, listen: str) -> StoreServerOptions:
    """Of the store servers that a job's command starts; `listen`: where each listens, port 0 takes a free one."""
    return StoreServerOptions(listen=listen, **{name: getattr(options, name) for name in _FOR_STORES})


def start_stores(engine: Engine, count: int, options: StoreServerOptions, environment: Mapping[str, str]) -> Processes:
    """Starts the store servers of a job, each with a part of `options.store`; `environment`: as of `Command`."""
    variables = {"PYTHONUNBUFFERED": "1", **environment}  # its address is read from its log
    each = [replace(options, store=url_of_server(options.store, number)) for number in range(count)]
    commands = [Command(["store", *command_words(of)], environment=variables) for of in each]
    return engine.start("store", commands, _STORES_LEAVE_S, _STORES_END_S)


def start_workers(
    engine: Engine, options: JobOptions, environment: Mapping[str, str], master: str | None = None
) -> Processes:
    """Starts the workers of a job.

    Args:
        options: Of the job.
        environment: As of `Command`.
        master: The master's address; None: it is written into a file once it is known (`Processes.tell`).
    """
    first = WorkerOptions(
        master=master or "file:///by-the-engine",
        model=options.model_file,
        deadline_s=options.deadline_s,
        transport=options.transport,
        profile=options.profile,
    )
    left_out, peers = (("master",), {"--master": "master"}) if master is None else ((), {})
    # The first alone makes a profile: two profilers of one host would write to one file.
    each = [first, *[replace(first, profile=None)] * (options.own_workers - 1)]
    commands = [Command(["worker", *command_words(of, left_out)], (), peers, environment) for of in each]
    return engine.start("worker", commands, _WORKERS_LEAVE_S, _WORKERS_END_S)


# Who may call the store servers that a command starts on this machine: the processes of its run, and nobody else


# What the environment says of roles is for servers that outlive a run.
_OTHERS = ("ELASTABLE_TOKEN_FILE", "ELASTABLE_WORKER_TOKEN_FILE")
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
            {**dict.fromkeys((*_OTHERS, _ROLES), ""), GIVEN_ADMINISTRATOR_TOKEN: administrator, GIVEN_TOKEN: worker},
            {STORES_TOKEN: worker},
        )
