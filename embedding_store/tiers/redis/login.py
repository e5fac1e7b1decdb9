"""User and password of Redis, from the environment of each process, and never from another process.

A login in a URL is taken as it is, and is then visible in the list of processes. No other process is given it: workers
look rows up at the master.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.checked_files import read_secret

__all__ = ["FILE_VARIABLE", "PASSWORD_VARIABLE", "USER_VARIABLE", "login_of_environment"]

USER_VARIABLE = "ELASTABLE_REDIS_USER"
PASSWORD_VARIABLE = "ELASTABLE_REDIS_PASSWORD"
FILE_VARIABLE = "ELASTABLE_REDIS_PASSWORD_FILE"
SENTINEL_USER_VARIABLE = "ELASTABLE_SENTINEL_USER"
SENTINEL_PASSWORD_VARIABLE = "ELASTABLE_SENTINEL_PASSWORD"
SENTINEL_FILE_VARIABLE = "ELASTABLE_SENTINEL_PASSWORD_FILE"


def login_of_environment(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """User and password of the servers, "" for what is not set.

    Raises:
        BadInput: the password is given twice, or its file cannot be read.
    """
    return _login(environment, USER_VARIABLE, PASSWORD_VARIABLE, FILE_VARIABLE)


def sentinel_login(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """As `login_of_environment`, of the Sentinels, which may have another login than the servers or none."""
    return _login(environment, SENTINEL_USER_VARIABLE, SENTINEL_PASSWORD_VARIABLE, SENTINEL_FILE_VARIABLE)


def _login(environment: Mapping[str, str], *names: str) -> tuple[str, str]:
    """User and password, from the variables of the user, the password and the password's file."""
    user, password, file = (environment.get(name, "") for name in names)
    _, password_name, file_name = names
    if password and file:
        raise BadInput(f"{password_name} and {file_name} are both set: set one of them")
    if file:
        try:
            password = read_secret(file, file_name).decode().strip("\r\n")
        except UnicodeDecodeError as error:
            raise BadInput(f"{file_name}: {file!r} is not UTF-8 text") from error
        if not password:
            raise BadInput(f"{file_name}: {file!r} is empty")
    return user, password
