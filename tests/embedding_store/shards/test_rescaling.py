"""Rows of a job moved to other store servers: wherever the move is killed, one list of servers counts at most."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from elastable.embedding_store.composite.moving import MovedRows, move_job
from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.errors import BadInput, ElastableError, Unsupported
from elastable.embedding_store.wire.pushes.remote_store import ShardClient
from tests.embedding_store.shards.served_shards import ServedShard, begin_job
from tests.embedding_store.shards.test_store_servers import assert_same_rows, begin, commit, push_all

RECORD = b"the dense part" * 100_000  # larger than one frame
VERSIONS = 3
CHANGES = ("create_table", "put", "put_table_state", "reset_version", "drop_table", "clear")


class Killed(BaseException):
    """The command is gone: nobody handles this."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], list[ServedShard]]]:
    held: list[ServedShard] = []

    def started(count: int) -> list[ServedShard]:
        new = [ServedShard(f"memory?log={tmp_path}/log-{len(held) + n}") for n in range(count)]
        held.extend(new)
        return new

    yield started
    for server in held:
        server.stop()


@contextmanager
def opened(servers: Sequence[ServedShard]) -> Iterator[StoreServers]:
    with StoreServers([ShardClient(server.address, 60.0) for server in servers]) as store:
        yield store


def trained(servers: Sequence[ServedShard]) -> None:
    with opened(servers) as store:
        begin(store)
        for version in range(VERSIONS):
            push_all(store, version)
            store.commit_pushed(commit(version, RECORD))


def move(old: Sequence[ServedShard], new: Sequence[ServedShard], client: type[ShardClient] = ShardClient) -> MovedRows:
    with ExitStack() as held:
        clients = {
            address: held.enter_context(client(address, 60.0))
            for address in dict.fromkeys(server.address for server in (*old, *new))
        }
        return move_job(_some(clients, old), _some(clients, new))


def _some(clients: Mapping[str, ShardClient], servers: Sequence[ServedShard]) -> dict[str, ShardClient]:
    return {server.address: clients[server.address] for server in servers}


def assert_goes_on(servers: Sequence[ServedShard]) -> None:
    """All rows, the record, and the next version as if nothing had been moved."""
    with opened(servers) as store:
        store.refuse_moved()
        assert store.record() == RECORD
        assert_same_rows(store, VERSIONS)
        begin_job(store, "job")
        push_all(store, VERSIONS)
        assert store.commit_pushed(commit(VERSIONS, RECORD)).missing == ()
        assert_same_rows(store, VERSIONS + 1)


Start = Callable[[int], list[ServedShard]]


@pytest.mark.parametrize(("before", "after"), [(2, 5), (3, 1)])
def test_a_job_goes_on_with_another_number_of_servers(start: Start, before: int, after: int) -> None:
    old, new = start(before), start(after)
    trained(old)
    moved = move(old, new)
    assert (moved.version, set(moved.rows)) == (VERSIONS, {"any", "fixed"})
    with opened(old) as store, pytest.raises(BadInput, match=f"write --stores {new[0].address}.* instead of"):
        store.refuse_moved()
    for server in (*old, *new):  # what counts is in the logs
        server.stop()
        server.start()
    again = move(old, new)
    assert (again.version, again.rows) == (VERSIONS, {})
    with opened(old) as store, pytest.raises(BadInput, match="have moved: write --stores"):
        store.refuse_moved()
    assert_goes_on(new)


def test_one_server_moves_to_another_host(start: Start) -> None:
    old, (other,) = start(3), start(1)
    trained(old)
    new = [old[0], other, old[2]]
    kept = {server.address: server.store.version() for server in old}
    move(old, new)
    assert {server.address: server.store.version() for server in old} == kept
    with opened(old) as store, pytest.raises(BadInput, match="have moved: write --stores"):
        store.refuse_moved()
    assert_goes_on(new)


def _dying(left: list[int], after: bool) -> type[ShardClient]:
    """Kills the command at one of its changes, before or after the server has made it."""

    def wrapped(name: str) -> Callable[..., object]:
        change = getattr(ShardClient, name)

        def make(self: ShardClient, *of: object, **more: object) -> object:
            left[0] -= 1
            if left[0] < 0 and not after:
                raise Killed
            made = change(self, *of, **more)
            if left[0] < 0:
                raise Killed
            return made

        return make

    return type("DyingClient", (ShardClient,), {name: wrapped(name) for name in CHANGES})


@pytest.mark.parametrize(("staying", "after"), [(False, False), (True, True)])
def test_a_move_that_is_killed_anywhere_is_ended_by_the_same_command(start: Start, staying: bool, after: bool) -> None:
    """Until it is ended, exactly one of the two lists is refused, or the new one is."""
    old = start(2)
    trained(old)
    new = [old[0], *start(1)] if staying else start(3)
    steps, counted = 0, set()
    while True:
        left = [steps]
        kind = _dying(left, after)
        try:
            move(old, new, kind)
        except Killed:
            counted.add(_counting(old, new))
            steps += 1
            continue
        break
    assert steps >= 6, "the move has more steps than that"
    # Where the new servers had everything and the last entry was missing, neither list may be used.
    assert counted == {"old", "neither"}
    assert _counting(old, new) == "new"
    assert_goes_on(new)


def _counting(old: Sequence[ServedShard], new: Sequence[ServedShard]) -> str:
    usable = []
    for name, servers in (("old", old), ("new", new)):
        if servers is new and any(not server.store.specs() for server in new):
            continue  # nothing there yet
        try:
            with opened(servers) as store:
                store.refuse_moved()
            usable.append(name)
        except BadInput:
            pass
    assert len(usable) < 2, "both lists count"
    return usable[0] if usable else "neither"


def test_what_cannot_be_moved_is_refused_before_anything_changes(start: Start) -> None:
    old, new = start(2), start(2)
    with pytest.raises(BadInput, match="no version has a record"):
        move(old, new)
    trained(old)
    with pytest.raises(BadInput, match="name the same store servers"):
        move(old, list(reversed(old)))
    with pytest.raises(BadInput, match="with 3 servers in the place of 2"):
        move(old, [*old, new[0]])
    with pytest.raises(BadInput, match="has place 0 in --from: it keeps it"):
        move(old, [new[0], old[0]])
    in_memory = ServedShard("memory")
    try:
        with pytest.raises(Unsupported, match="has no log"):
            move(old, [in_memory])
    finally:
        in_memory.stop()
    trained(new)
    with pytest.raises(BadInput, match=f"{new[0].address} holds rows at version {VERSIONS}: name empty ones"):
        move(old, new)
    assert_goes_on(old)
    assert_goes_on(new)


def test_a_move_that_was_begun_to_other_servers_is_named(start: Start) -> None:
    old, new, others = start(2), start(3), start(1)
    trained(old)
    left = [4]
    kind = _dying(left, False)
    with pytest.raises(Killed):
        move(old, new, kind)
    with opened(new) as store, pytest.raises(BadInput, match=r"elastable store rescale --from .* --to .*go on where"):
        store.refuse_moved()
    third = start(1)
    trained(third)
    with pytest.raises(BadInput, match="has a part in another move of rows: `elastable store rescale"):
        move(third, new)
    assert_goes_on(third)
    move(old, others)
    with pytest.raises(ElastableError, match="has a part in another move"):
        move(old, new)
    assert_goes_on(others)
