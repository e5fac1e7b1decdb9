from __future__ import annotations

from pathlib import Path

import pytest

from elastable.embedding_store.errors import BadInput, StoreFailed
from elastable.embedding_store.open_store import open_source, open_store
from elastable.embedding_store.tiers.redis.login import (
    FILE_VARIABLE,
    PASSWORD_VARIABLE,
    USER_VARIABLE,
    login_of_environment,
    split_login,
)
from elastable.embedding_store.tiers.redis.url import RedisUrl
from tests.contracts.store_samples import fixed
from tests.servers import running_server


def said(user: str, password: str) -> dict[str, str]:
    return {USER_VARIABLE: user, PASSWORD_VARIABLE: password, FILE_VARIABLE: ""}


@pytest.mark.parametrize(
    ("url", "bare", "login"),
    [
        ("redis://h:1", "redis://h:1", {}),
        ("redis://me:p%40ss@h:1,g:2/3?namespace=n", "redis://h:1,g:2/3?namespace=n", said("me", "p@ss")),
        ("redis://:a,b@h", "redis://h", said("", "a,b")),
        ("redis://me:a@b@h", "redis://h", said("me", "a@b")),
        ("rediss://:x@h?ca=/a@b", "rediss://h?ca=/a@b", said("", "x")),
        ("cached+redis://me:x@h?rows=5", "cached+redis://h?rows=5", said("me", "x")),
        ("token:redis://me:x@h,redis://me:x@g", "token:redis://h,redis://g", said("me", "x")),
        ("encoding:redis://me:x@h,memory", "encoding:redis://h,memory", said("me", "x")),
        ("memory", "memory", {}),
        ("grpc://h:1", "grpc://h:1", {}),
        ("file:///a@b", "file:///a@b", {}),
    ],
)
def test_a_url_without_its_login(url: str, bare: str, login: dict[str, str]) -> None:
    assert split_login(url) == (bare, login)
    assert split_login(bare) == (bare, {})


def test_different_logins_cannot_be_said() -> None:
    with pytest.raises(BadInput, match="different logins") as refused:
        split_login("token:redis://me:x1@h,redis://me:x2@g")
    assert "x1" not in str(refused.value)


def test_the_environment_says_what_the_url_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (USER_VARIABLE, PASSWORD_VARIABLE, FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert login_of_environment() == ("", "")
    file = tmp_path / "password"
    file.write_text("of the file\n")
    file.chmod(0o600)
    monkeypatch.setenv(USER_VARIABLE, "me")
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    url = RedisUrl.parse("redis://h")
    assert (url.username, url.password) == ("me", "of the file")
    assert "of the file" not in repr(url)
    url = RedisUrl.parse("redis://other:own@h")
    assert (url.username, url.password) == ("other", "own")
    monkeypatch.setenv(PASSWORD_VARIABLE, "another")
    with pytest.raises(BadInput, match="both set"):
        RedisUrl.parse("redis://h")
    monkeypatch.delenv(PASSWORD_VARIABLE)
    for text in ("", "\n"):
        file.write_text(text)
        with pytest.raises(BadInput, match="is empty"):
            RedisUrl.parse("redis://h")


def test_what_workers_are_told_opens_with_the_login_of_their_own_environment(
    server_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(server_binary, tmp_path / "locked", password="right&secret") as server:
        given = f"redis://:right%26secret@127.0.0.1:{server.port}"
        with open_store(given) as store:
            store.create_table(fixed())
        told, login = split_login(given)
        assert "secret" not in told
        with pytest.raises(StoreFailed, match="this process gives no password: set ELASTABLE_REDIS_PASSWORD_FILE"):
            open_source(told).specs()
        for name, value in login.items():
            monkeypatch.setenv(name, value)
        with open_source(told) as source:
            assert set(source.specs()) == {"cities"}
