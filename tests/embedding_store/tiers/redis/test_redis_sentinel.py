"""A master that Sentinels watch: found through them, and followed when it fails in the middle of writes."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.errors import StoreFailed, Unavailable
from elastable.embedding_store.tiers.redis.record_transfer import LostPartition
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.embedding_store.tiers.redis.url import RedisUrl
from tests.embedding_store.tiers.redis.tier_samples import begin, changed, read_back, rows_of
from tests.sentinels import Watched, running_watched

pytestmark = pytest.mark.process

_DEADLINE_S = 120.0


@pytest.fixture
def watched(server_binary: Path, tmp_path: Path) -> Iterator[Watched]:
    with running_watched(server_binary, tmp_path) as watched:
        yield watched


def url_of(watched: Watched, deadline_s: float = _DEADLINE_S) -> str:
    return f"{watched.url}&deadline={deadline_s:g}&partitions=8"


def wait_until_replicated(watched: Watched) -> None:
    with watched.master().client() as client:
        assert client.wait(1, int(1000 * _DEADLINE_S)) == 1


def test_the_master_is_killed_in_the_middle_of_writes(watched: Watched) -> None:
    with RedisTier(url_of(watched)) as tier, RedisTier(url_of(watched)) as reader:
        begin(tier)
        tier.put_state(b"one")
        assert reader.state() == b"one"
        np.testing.assert_array_equal(read_back(reader), rows_of(1))
        wait_until_replicated(watched)
        old = watched.master()
        written = 1

        def write() -> None:
            nonlocal written
            while not done.is_set() or written < 4:
                tier.write(changed(1), {}, 1)  # what is confirmed may be lost with the master: it is written twice
                written += 1

        done = threading.Event()
        writing = threading.Thread(target=write)
        writing.start()
        old.kill()
        while watched.master() is old and writing.is_alive():
            done.wait(0.05)
        done.set()
        writing.join(_DEADLINE_S)
        assert not writing.is_alive()
        assert written >= 4
        tier.write(changed(2), {}, 2)
        tier.put_state(b"two")
        np.testing.assert_array_equal(read_back(reader), rows_of(2))
        assert reader.state() == b"two"
        assert watched.master() is not old
    with RedisTier(url_of(watched)) as again:
        assert set(again.tables()) == {"t"}
        assert again.sequence == 2


def test_a_master_that_hangs_is_left_within_the_deadline_of_the_next_try(watched: Watched) -> None:
    with RedisTier(url_of(watched, 5)) as tier:
        begin(tier)
        wait_until_replicated(watched)
        old = watched.master()
        assert old.process is not None
        old.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(30):
                try:
                    tier.write(changed(2), {}, 2)
                    break
                except Unavailable:
                    pass
            assert watched.master() is not old
            np.testing.assert_array_equal(read_back(tier), rows_of(2))
        finally:
            old.process.send_signal(signal.SIGCONT)


def test_a_replica_that_lagged_takes_over(watched: Watched) -> None:
    """Writes that were confirmed are gone: nothing is written over what is left, in this process and in later ones."""
    with RedisTier(url_of(watched)) as tier:
        begin(tier)
        tier.put_state(b"one")
        wait_until_replicated(watched)
        replica = watched.replica()
        assert replica.process is not None
        replica.process.send_signal(signal.SIGSTOP)
        old = watched.master()
        with old.client() as client:
            client.client_kill_filter(_type="replica")  # what is written now never gets there
        tier.write(changed(2), {}, 2)
        tier.put_state(b"two")
        old.kill()
        replica.process.send_signal(signal.SIGCONT)
        with pytest.raises(
            LostPartition,
            match=r"partition \d of table 't': its last write is that of sequence 1, and one "
            r"of sequence 2 was confirmed.*a replica that lagged",
        ):
            tier.write(changed(3), {}, 3)
        with pytest.raises(LostPartition):
            read_back(tier)
        with pytest.raises(LostPartition, match="'t'"):
            tier.tables()
    with RedisTier(url_of(watched)) as later, pytest.raises(LostPartition, match="a writer found it gone"):
        later.tables()


def test_logins_of_servers_and_sentinels(server_binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_watched(server_binary, tmp_path, "of-servers", "of-sentinels") as watched:
        url = watched.url
        with pytest.raises(Unavailable, match=r"no Sentinel .*ELASTABLE_SENTINEL_PASSWORD_FILE") as refused:
            RedisTier(f"{url}&deadline=5")
        assert "of-servers" not in str(refused.value)
        file = tmp_path / "password"
        file.write_text("of-sentinels")
        file.chmod(0o600)
        monkeypatch.setenv("ELASTABLE_SENTINEL_PASSWORD_FILE", str(file))
        with RedisTier(url) as tier:
            begin(tier)
            assert "of-servers" not in tier.place
        with pytest.raises(StoreFailed, match="WRONGPASS"):
            RedisTier(url.replace("of-servers", "another"))
        assert "of-sentinels" not in repr(RedisUrl.parse(url))


def test_a_service_that_nobody_knows(redis_sentinel_url: str) -> None:
    with pytest.raises(Unavailable, match="it knows no master 'other' that is up"):
        RedisTier(f"{redis_sentinel_url.replace('mymaster', 'other')}&deadline=1")
