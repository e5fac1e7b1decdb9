from __future__ import annotations

from pathlib import Path

import pytest

from elastable.embedding_store.errors import BadInput, StoreFailed
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.tiers.redis.url import (
    FILE_VARIABLE,
    PASSWORD_VARIABLE,
    USER_VARIABLE,
    RedisUrl,
    login_of_environment,
)
from tests.contracts.store_samples import fixed
from tests.servers import running_server


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


def test_without_a_login_the_error_says_how_to_give_one(server_binary: Path, tmp_path: Path) -> None:
    with running_server(server_binary, tmp_path / "locked", password="right&secret") as server:
        with open_store(f"redis://:right%26secret@{server.address}") as store:
            store.create_table(fixed())
        with pytest.raises(StoreFailed, match="this process gives no password: set ELASTABLE_REDIS_PASSWORD_FILE"):
            open_store(server.url)
