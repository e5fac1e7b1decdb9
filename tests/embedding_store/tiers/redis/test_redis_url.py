"""Redis URLs: what they say, what is refused, and that a password never shows."""

from pathlib import Path

import pytest

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.tiers.redis.url import FILE_VARIABLE, RedisUrl, login_of_environment


def test_every_part_of_a_url() -> None:
    url = RedisUrl.parse("rediss://me:p%40ss@a.net:7000,[::1]:7001,b/3?namespace=job&partitions=8&deadline=2.5&ca=/x")
    seeds = (Address("a.net", 7000), Address("::1", 7001), Address("b", 6379))
    assert url == RedisUrl(seeds, "me", "p@ss", 3, True, "/x", "job", 8, 2.5)
    assert RedisUrl.parse("redis://localhost") == RedisUrl((Address("localhost", 6379),))
    assert RedisUrl.parse("redis://[::1]").seeds == (Address("::1", 6379),)
    url = RedisUrl.parse("rediss+sentinel://u:p@a,b:1/2?service=s&namespace=n")
    assert url == RedisUrl((Address("a", 26379), Address("b", 1)), "u", "p", 2, True, namespace="n", service="s")
    assert str(url) == "rediss+sentinel://a:26379,b:1/2?service=s"


def test_a_password_is_taken_as_it_is_and_never_shows() -> None:
    assert RedisUrl.parse("redis://:secret@h:1").password == "secret"
    assert RedisUrl.parse("redis://me:p@ss#w@h:1").password == "p@ss#w"
    assert RedisUrl.parse("redis://me:p%2Fs%3Fs@h:1").password == "p/s?s"
    url = RedisUrl.parse("redis://me:secret@h:1,g:2/5?namespace=n")
    assert str(url) == "redis://h:1,g:2/5"
    assert "secret" not in repr(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://h:1", "scheme 'http'"),
        ("redis://", "address"),
        ("redis://me:secret@", "address"),
        ("redis://me:secret@h:x", "port 'x'"),
        ("redis://me:secret@h:1/x", "database.*'x'"),
        ("redis://me:secret@h:1/-1", "database.*'-1'"),
        ("redis://me:secret@h:1?partitions=7", "power of two"),
        ("redis://me:secret@h:1?partitions=many", "partitions.*'many'"),
        ("redis://me:secret@h:1?deadline=0", "deadline"),
        ("redis://me:secret@h:1?deadline=nan", "deadline"),
        ("redis://me:secret@h:1?deadline=soon", "deadline.*'soon'"),
        ("redis://me:secret@h:1?namespace=a:b", "namespace"),
        ("redis://me:secret@h:1?retries=4", "'retries'.*namespace, partitions.*service, budget, .*acknowledged_in$"),
        ("redis://me:secret@h:1?namspace=x", "'namspace' is unknown; .*; did you mean namespace[?]$"),
        ("redis://me:secret@h:1?budgt=1GiB", "'budgt' is unknown; .*; did you mean budget[?]$"),
        ("redis://me:secret@h:1?budget=1GiB", "'budget' of a Redis URL is of a store of rows"),
        ("redis://me:secret/a@h:1", "percent-encode them, as in %40 for @, %23 for #"),
        ("redis://me:secret?a@h:1", "percent-encode"),
        ("redis://me:secret?a=b@h:1?namespace=x", "percent-encode"),
        ("redis://me:secret%3F?a%40h", "percent-encode"),  # as the options of the engine are taken out of it
        ("redis://me:se@cret#secret", "percent-encode"),
        ("redis://me:secret@h:1?held_bytes=1GiB", "'held_bytes' is unknown"),
        ("redis://me:secret@[::1:1", "address"),
        *(
            (url, "option service of a Redis URL")
            for url in ("redis+sentinel://h", "redis+sentinel://h?service=", "redis://h?service=x")
        ),
    ],
)
def test_what_is_refused(url: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        RedisUrl.parse(url)
    assert "secret" not in str(refused.value)


def test_the_environment_says_what_the_url_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user, password = "ELASTABLE_REDIS_USER", "ELASTABLE_REDIS_PASSWORD"
    for name in (user, password, FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert login_of_environment() == ("", "")
    file = tmp_path / "password"
    file.write_text("of the file\n")
    file.chmod(0o600)
    monkeypatch.setenv(user, "me")
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    url = RedisUrl.parse("redis://h")
    assert (url.username, url.password) == ("me", "of the file")
    assert "of the file" not in repr(url)
    url = RedisUrl.parse("redis://other:own@h")
    assert (url.username, url.password) == ("other", "own")
    monkeypatch.setenv(password, "another")
    with pytest.raises(BadInput, match="both set"):
        RedisUrl.parse("redis://h")
    monkeypatch.delenv(password)
    for text in ("", "\n"):
        file.write_text(text)
        with pytest.raises(BadInput, match="is empty"):
            RedisUrl.parse("redis://h")
