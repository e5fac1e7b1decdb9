import logging
from pathlib import Path

import pytest

from elastable.embedding_store import Credentials
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.checked_files import read_secret
from elastable.embedding_store.tiers.redis.url import login_of_environment


def secret(home: Path, mode: int, text: str = "s3cret\n") -> Path:
    file = home / "secret"
    file.write_text(text)
    file.chmod(mode)
    return file


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_a_private_file_is_read_without_a_word(tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    assert read_secret(secret(tmp_path, mode), "the token") == b"s3cret\n"
    assert not caplog.records


def test_one_that_everybody_may_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read_secret(secret(tmp_path, 0o644), "the token")
    assert "the token: everybody on this machine may read" in caplog.text
    assert "mode 0644" in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize("mode", [0o660, 0o602, 0o666])
def test_one_that_others_may_change_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    file = secret(tmp_path, mode)
    monkeypatch.setenv("ELASTABLE_REDIS_PASSWORD_FILE", str(file))
    with pytest.raises(BadInput, match=f"the token: .* may be changed by others .mode {mode:04o}.*chmod 600"):
        read_secret(file, "the token")
    with pytest.raises(BadInput, match=r"ELASTABLE_TOKEN_FILE.*may be changed by others"):
        Credentials.from_environment({"ELASTABLE_TOKEN_FILE": str(file)})
    with pytest.raises(BadInput, match=r"ELASTABLE_REDIS_PASSWORD_FILE.*may be changed by others"):
        login_of_environment()


def test_what_is_no_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        read_secret(tmp_path / "absent", "the token")
    with pytest.raises(BadInput, match="longer than"):
        read_secret(secret(tmp_path, 0o600, "x" * (1 << 21)), "the token")
