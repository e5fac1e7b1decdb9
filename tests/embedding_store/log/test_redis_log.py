"""The log in Redis when the server, the connection or another process fails it."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import redis

from elastable.embedding_store.errors import (
    BadInput,
    DeadlineExceeded,
    StaleVersion,
    StoreBroken,
    StoreFailed,
    TakenOver,
)
from elastable.embedding_store.log.contract import LogEntry
from elastable.embedding_store.tiers.redis.redis_log import RedisLog
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.stream_records import MAX_ENTRY_BYTES, PART_BYTES
from tests.cutting_proxy import cutting_proxy
from tests.embedding_store.log.log_places import Entry, read
from tests.servers import Server, running_server
from tests.tcp_proxy import tcp_proxy

_BYTES = np.random.default_rng(1).bytes(3 * PART_BYTES)
KEY = "{elastable}:log"


def append(log: RedisLog, *sizes: int) -> list[Entry]:
    appended = []
    for sequence, size in enumerate(sizes, log.last + 1):
        log.append(sequence, 10 * sequence, [_BYTES[:size]])
        appended.append((sequence, 10 * sequence, _BYTES[:size]))
    return appended


@contextmanager
def impatient(place: RedisPlace) -> Iterator[None]:
    """What is called inside fails at its deadline."""
    patient = place.url
    place.url = replace(patient, deadline=0.3)
    with pytest.raises(DeadlineExceeded, match=r"within the deadline of 0\.3 s"):
        yield
    place.url = patient


def news(log: RedisLog, after: int) -> Iterator[LogEntry]:
    """What another process has appended, too."""
    log.refresh()
    yield from log.entries(after)


def whole(url: str) -> list[Entry]:
    with RedisLog(url) as log:
        return read(log, after=log.first - 1)


# --- one process writes -----------------------------------------------------------------------------


def test_a_superseded_process_cannot_change_the_log(any_server_url: str) -> None:
    url = any_server_url
    with closing(RedisPlace(url)) as place, RedisLog(url) as first, RedisLog(place) as second:
        entries = append(first, 5, 7)
        with pytest.raises(StaleVersion, match="has grown to entry 2 since it was opened: open it again"):
            append(second, 1)
        second.refresh()
        entries += append(second, PART_BYTES + 1)
        for change in (lambda: append(first, 9), lambda: first.trim(2), lambda: first.truncate(1), first.sync):
            with pytest.raises(TakenOver, match=f"its owner is now process {os.getpid()} on "):
                change()
        assert (first.last, second.last) == (2, 3)
        assert read(second) == entries
        place.take_over()  # once more: its own connections from before are out, and the log goes on
        entries += append(second, 3)
    assert whole(url) == entries


def test_opening_to_read_takes_nothing_over(redis_url: str) -> None:
    with RedisLog(redis_url) as writer:
        entries = append(writer, 5, PART_BYTES + 5)
        with RedisLog(redis_url) as reader:
            assert read(reader) == entries
            entries += append(writer, 1)
            assert read(reader) == entries[:-1], "it reads what there was"
            reader.refresh()
            assert read(reader) == entries


def test_where_connections_cannot_be_ended_the_owner_key_keeps_others_out(redis_url: str, meek_url: str) -> None:
    with RedisLog(redis_url) as first, RedisLog(meek_url) as second:
        entries = append(first, 5)
        second.refresh()
        entries += append(second, 5)
        with pytest.raises(TakenOver):  # its connection is open, and watches the owner's key
            append(first, 5)
        assert read(second) == entries


# --- readers ----------------------------------------------------------------------------------------


def test_a_follower_reads_entries_as_they_come(any_server_url: str) -> None:
    url, seen = f"{any_server_url}?deadline=60", list[Entry]()
    sizes = [number * 977 % 3_000 for number in range(200)] + [2 * PART_BYTES + 1]
    with RedisLog(url) as writer, RedisLog(url) as reader:

        def follow() -> None:
            while len(seen) < len(sizes):
                found = news(reader, len(seen))
                seen.extend((entry.sequence, entry.version, bytes(entry.payload)) for entry in found)

        following = threading.Thread(target=follow, daemon=True)
        following.start()
        entries = append(writer, *sizes)
        following.join(120)
        assert seen == entries
        assert list(news(reader, len(seen))) == []


def test_a_follower_learns_that_what_it_read_was_taken_back(redis_url: str) -> None:
    for sizes in ((), (5,), (5, 6)):
        url = f"{redis_url}?namespace=n{len(sizes)}"
        with RedisLog(url) as writer, RedisLog(url) as reader, RedisLog(url) as late:
            append(writer, 1, 2, 3)
            assert [entry.sequence for entry in news(reader, 0)] == [1, 2, 3]
            assert [entry.sequence for entry in news(late, 1)] == [2, 3]
            writer.truncate(2)
            append(writer, *sizes)
            for follower in (reader, late):
                with pytest.raises(StaleVersion, match="entry 3 or one after it was taken back since it was read"):
                    list(news(follower, 3))
                assert next(news(follower, 1)).sequence == 2


def test_a_follower_learns_that_what_it_reads_is_trimmed_or_taken_back(redis_url: str) -> None:
    with RedisLog(redis_url) as writer, RedisLog(redis_url) as reader:
        append(writer, *[10] * 50)
        reading = news(reader, 0)
        assert next(reading).sequence == 1
        writer.trim(40)
        with pytest.raises(BadInput, match=r"begins with entry 40: those after \d+ were trimmed"):
            list(reading)
        reading = news(reader, 40)
        append(writer, *[10] * 50)
        assert next(reading).sequence == 41
        writer.truncate(70)
        with pytest.raises(StaleVersion, match="taken back"):
            list(reading)


# --- the connection breaks --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5, 2 * PART_BYTES + 1])
def test_an_entry_whose_answer_is_lost_is_there_once(redis_node: Server, redis_url: str, size: int) -> None:
    with cutting_proxy(redis_node.port) as proxy:
        with RedisLog(f"redis://127.0.0.1:{proxy.port}?deadline=60") as log:
            entries = append(log, 3)
            for _ in range(3):
                proxy.transactions = 1
                entries += append(log, size)
            assert proxy.transactions is None
            assert read(log) == entries
        assert whole(redis_url) == entries


@pytest.mark.parametrize("following", ["the same", "another", "none"])
@pytest.mark.parametrize(("size", "lost"), [(5, "lose_everything"), (2 * PART_BYTES + 1, "lose_answers")])
def test_an_append_without_answer(redis_node: Server, redis_url: str, size: int, lost: str, following: str) -> None:
    """It may be there or not; the same entry is there once then, and another one takes its place."""
    with (
        tcp_proxy(redis_node.port) as proxy,
        closing(RedisPlace(f"redis://127.0.0.1:{proxy.port}?deadline=60")) as place,
        RedisLog(place) as log,
    ):
        entries = append(log, 3)
        getattr(proxy, lost)()
        with impatient(place):
            append(log, size)
        assert log.last == 1
        proxy.hang_up_on_clients()
        if following == "the same":
            entries += append(log, size)
        elif following == "another":
            log.append(2, 7, [b"other"])
            entries.append((2, 7, b"other"))
        else:
            assert read(log) == entries, "it was not appended, as far as this process goes"
            log.trim(1)
            log.truncate(1)
        entries += append(log, 4)
        assert read(log) == entries
        assert whole(redis_url) == entries


def test_what_a_stopped_server_executes_later_is_not_taken_for_another_entry(fleeting: Server) -> None:
    """The old connection's bytes wait in the server: it executes them before or after what comes next, or never."""
    with closing(RedisPlace(f"{fleeting.url}?deadline=60")) as place, RedisLog(place) as log:
        entries = append(log, 3)
        assert fleeting.process is not None
        for size in (5, PART_BYTES + 1):
            fleeting.process.send_signal(signal.SIGSTOP)
            with impatient(place):
                append(log, size)
            fleeting.process.send_signal(signal.SIGCONT)
            entries += append(log, size // 2)
            assert whole(fleeting.url) == entries


# --- the server refuses, or loses what it had -------------------------------------------------------


def test_a_full_server_refuses_an_entry_and_the_log_is_as_it_was(redis_node: Server, redis_url: str) -> None:
    with redis_node.client() as client, RedisLog(redis_url) as log:
        entries = append(log, 3, 1_000)
        client.config_set("maxmemory", "1mb")
        try:
            for size in (5, 2 * PART_BYTES + 1):
                with pytest.raises(StoreFailed, match=r"does not take entry 3-0: OOM .*the server is full: raise"):
                    append(log, size)
                assert read(log) == entries
        finally:
            client.config_set("maxmemory", "0")
        entries += append(log, 2 * PART_BYTES + 1)
        assert whole(redis_url) == entries


def test_an_entry_beyond_what_redis_takes_at_once_is_refused(redis_url: str) -> None:
    with RedisLog(redis_url) as log:
        piece = memoryview(bytes(1 << 20))
        with pytest.raises(StoreFailed, match=r"entry 1 takes 1,049,624,576 bytes, and Redis takes 1,048,576,000 at"):
            log.append(1, 1, [piece] * (MAX_ENTRY_BYTES // len(piece) + 1))
        assert append(log, 3) == read(log)


def test_a_server_that_forgot_everything(fleeting: Server) -> None:
    with RedisLog(f"{fleeting.url}?deadline=60") as log:
        append(log, 3)
        fleeting.kill()
        fleeting.start()
        with pytest.raises(TakenOver, match="nobody any more"):
            append(log, 5)


def test_a_log_that_comes_back_older(durable: Server) -> None:
    """The end of the append-only file is lost: whole entries are, and a process that had appended them says which."""
    with RedisLog(f"{durable.url}?deadline=60") as log:
        entries = append(log, 3, PART_BYTES + 1, 70, 2 * PART_BYTES, 9)
        durable.kill()
        (file,) = (durable.directory / "appendonlydir").glob("*.incr.aof")
        content = file.read_bytes()
        begin = content.rindex(b"$3\r\n4-0")  # in the transaction of the fourth entry
        for cut in (begin, begin + 100, len(content) - 3):
            file.write_bytes(content[:cut])
            durable.start()
            found = whole(durable.url)
            assert found == entries[: len(found)]
            assert len(found) == (4 if cut > begin + 100 else 3)
            with pytest.raises(StoreBroken, match=f"ends with entry {len(found)}, and 5 was appended: the server has"):
                append(log, 5)
            durable.kill()


def test_a_server_that_came_back_older_is_not_trimmed(durable: Server) -> None:
    """What made the entries unnecessary may be lost, too: they are what the store comes back from."""
    with RedisLog(f"{durable.url}?deadline=60") as log:
        entries = append(log, 3, 4, 5, 6, 7, 8)
        log.trim(2)
        assert log.first == 2
        durable.kill()
        (file,) = (durable.directory / "appendonlydir").glob("*.incr.aof")
        content = file.read_bytes()
        file.write_bytes(content[: content.rindex(b"$3\r\n5-0")])
        durable.start()
        log.trim(3)
        assert whole(durable.url) == entries[:4]
        with pytest.raises(StoreBroken, match="entry 6 is missing, which was appended"):
            log.trim(6)
        log.trim(3)  # what made them unnecessary was kept since then
        assert whole(durable.url) == entries[2:4]


def damaged(server: Server, damage: str) -> str:
    """A log of six entries, the fourth in three parts, in which something is not as it was left; its URL."""
    with RedisLog(server.url) as log:
        append(log, 3, 30, 300, 2 * PART_BYTES + 1, 5, 6)
    with server.client() as client:
        parts = client.xrange(KEY)
        client.delete(KEY)
        for name, fields in parts:
            if damage.startswith("no ") and name.decode() == damage.removeprefix("no "):
                continue
            if damage == "flipped" and name == b"4-1":
                fields[b"payload"] = fields[b"payload"][:-1] + bytes([fields[b"payload"][-1] ^ 1])
            if damage == "version" and name == b"4-1":
                fields[b"version"] = b"41"
            if damage == "header" and name == b"4-2":
                fields[b"header"] = fields[b"header"][:-1] + b"?"
            if damage == "of another" and name == b"3-0":
                fields[b"header"] = dict(parts)[b"2-0"][b"header"]
            if damage == "field" and name == b"3-0":
                fields = {b"what": b"ever"}
            client.xadd(KEY, fields, name)
    return server.url


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no 3-0", "corrupt at stream entry 3-0: it is missing, and 4-0 is the next one"),
        ("no 4-0", "corrupt at stream entry 4-0: it is missing, and 4-1 is the next one"),
        ("no 4-1", "corrupt at stream entry 4-1: it is missing, and 4-2 is the next one"),
        ("no 4-2", "corrupt at stream entry 4-2: it is missing, and 5-0 is the next one"),
        ("flipped", "corrupt at stream entry 4-2: the checksum of the payload is another one"),
        ("version", "corrupt at stream entry 4-1: its version or its place is not that of the part before it"),
        ("header", "corrupt at stream entry 4-2: it is no part of a log entry"),
        ("of another", "corrupt at stream entry 3-0: its header is that of another entry"),
        ("field", "corrupt at stream entry 3-0: it is no part of a log entry"),
    ],
)
def test_corrupt_entries_are_named(redis_node: Server, redis_url: str, damage: str, message: str) -> None:
    with RedisLog(damaged(redis_node, damage)) as log:
        seen: list[int] = []
        with pytest.raises(StoreBroken, match=message):
            seen.extend(entry.sequence for entry in log.entries())
        assert seen == [1, 2, 3][: int(message.split("entry ")[1][0]) - 1]


def test_what_is_no_log_is_not_taken_for_one(redis_node: Server, redis_url: str) -> None:
    with redis_node.client() as client:
        client.set(KEY, "text")
        with pytest.raises(StoreFailed, match="WRONGTYPE"):
            RedisLog(redis_url)
        client.delete(KEY)
        client.xadd(KEY, {"some": "thing"})
        with pytest.raises(StoreBroken, match="it is no part of a log entry"):
            RedisLog(redis_url)


@pytest.fixture(name="aof", params=["always", "everysec"])
def fixture_aof(request: pytest.FixtureRequest, server_binary: Path, tmp_path: Path) -> Iterator[Server]:
    with running_server(server_binary, tmp_path, ("--appendonly", "yes", "--appendfsync", request.param)) as server:
        yield server


def test_sync_waits_for_the_append_only_file(aof: Server) -> None:
    with RedisLog(f"{aof.url}?deadline=60") as log, aof.client() as client:
        for size in (3, 5 * PART_BYTES // 2):
            append(log, size)
            client.client_kill_filter(_type="normal", skipme=True)  # another connection than the one that appended
            log.sync()
            try:
                confirmed = client.execute_command("WAITAOF", 1, 0, 1)[0]
            except redis.ResponseError as error:
                assert "unknown command" in str(error)  # noqa: PT017 - Redis 7.0 lacks it
            else:
                assert confirmed == 1
