"""User and password of Redis, from the environment of each process, and never from another process.

A URL that gives a login is taken as it is. It stands in the list of processes
then, and it goes to no other process but the local workers of the job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import unquote

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.secret_file import read_secret
from elastable.embedding_store.support.store_url import shard_urls

__all__ = ["FILE_VARIABLE", "PASSWORD_VARIABLE", "USER_VARIABLE", "login_of_environment", "split_login"]

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


def split_login(url: str) -> tuple[str, dict[str, str]]:
    """A store's URL without any login in it, and the variables that say the login instead.

    Args:
        url: Of any kind of store, those that are split over several among them.

    Raises:
        BadInput: stores of one URL have different logins, which no variable can say.
    """
    strategy, shards = shard_urls(url)
    if not strategy:
        return _split(url)
    parts = [split_login(shard) for shard in shards]
    logins = [login for _, login in parts if login]
    if any(login != logins[0] for login in logins):
        raise BadInput(
            "the stores of one URL have different logins, which workers cannot be given: "
            "let them have one user and password"
        )
    return f"{strategy}:{','.join(shard for shard, _ in parts)}", logins[0] if logins else {}


def _split(url: str) -> tuple[str, dict[str, str]]:
    scheme, mark, rest = url.partition("://")
    if scheme.removeprefix("cached+") not in ("redis", "rediss"):
        return url, {}
    place, question, query = rest.partition("?")
    hosts, slash, path = place.partition("/")
    login, at, hosts = hosts.rpartition("@")
    user, _, password = login.partition(":")
    bare = f"{scheme}{mark}{hosts}{slash}{path}{question}{query}"
    return bare, {USER_VARIABLE: unquote(user), PASSWORD_VARIABLE: unquote(password), FILE_VARIABLE: ""} if at else {}
