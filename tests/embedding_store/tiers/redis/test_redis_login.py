from pathlib import Path

import pytest

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.tiers.redis.url import (
    FILE_VARIABLE,
    PASSWORD_VARIABLE,
    USER_VARIABLE,
    RedisUrl,
    login_of_environment,
)


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
