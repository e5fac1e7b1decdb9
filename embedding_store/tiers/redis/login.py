"""User and password of Redis, from the environment of each process, and never from another process.

A login in a URL is taken as it is, and is then visible in the list of processes. No other process is given it: workers
look rows up at the master.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.secret_file import read_secret

__all__ = ["FILE_VARIABLE", "PASSWORD_VARIABLE", "USER_VARIABLE", "login_of_environment"]

USER_VARIABLE = "ELASTABLE_REDIS_USER"
PASSWORD_VARIABLE = "ELASTABLE_REDIS_PASSWORD"
FILE_VARIABLE = "ELASTABLE_REDIS_PASSWORD_FILE"


def login_of_environment(environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """User and password, "" for what is not set.

    Raises:
        BadInput: the password is given twice, or its file cannot be read.
    """
    user, password, file = (environment.get(name, "") for name in (USER_VARIABLE, PASSWORD_VARIABLE, FILE_VARIABLE))
    if password and file:
        raise BadInput(f"{PASSWORD_VARIABLE} and {FILE_VARIABLE} are both set: set one of them")
    if file:
        try:
            password = read_secret(file, FILE_VARIABLE).decode().strip("\r\n")
        except UnicodeDecodeError as error:
            raise BadInput(f"{FILE_VARIABLE}: {file!r} is not UTF-8 text") from error
        if not password:
            raise BadInput(f"{FILE_VARIABLE}: {file!r} is empty")
    return user, password
