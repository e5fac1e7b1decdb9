"""Store servers keep pushes by name, and make versions of them together, as their owner alone says."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import grpc
import numpy as np
import pytest

from elastable.embedding_store import Commit, MemoryStore, OptimizerSpec, RemoteStore, RowBlock, TableSpec, errors
from elastable.embedding_store.composite.partitions import partition
from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.errors import Unavailable
from elastable.embedding_store.shards.ownership import position_of, refuse_other_position, session_of
from elastable.embedding_store.shards.server_contract import (
    PushedCommit,
    RowPush,
    RowPushOutcome,
    RowSums,
    Slices,
    SumTerm,
    TableClip,
)
from elastable.embedding_store.shards.version_sums import clipped_update, exact_squares, sum_pushes
from elastable.embedding_store.support.retry import retry
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from elastable.embedding_store.wire.access.credentials import PROOF_KEYS, Proof
from elastable.embedding_store.wire.channels.server_connection import channel
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE, block_frames
from elastable.embedding_store.wire.pushes.remote_store import ShardClient
from tests.contracts.store_samples import create_tables
from tests.embedding_store.shards.served_shards import KEY, ServedShard, begin_job, push_as_sender, served, stopped_with
from tests.waiting import until

FIXED = TableSpec("fixed", 3, 50, optimizer=OptimizerSpec.of("adagrad"))
ANY = TableSpec("any", 2, optimizer=OptimizerSpec.of("adam"))
JOB = "job"


def push(version: int, micro_batch: int, rows: int = 40) -> RowPush:
    """Two parts, ids that come twice among them; the same bits whenever it is made."""
    random = np.random.default_rng([version, micro_batch])

    def slices(table: TableSpec) -> Slices:
        ids = random.integers(0, 50, rows) * (1 if table is FIXED else -7)
        return Slices(ids, random.standard_normal((rows, table.dim)).astype(np.float32))

    return RowPush(JOB, version, micro_batch, ({"fixed": slices(FIXED), "any": slices(ANY)}, {"any": slices(ANY)}))


def sums(version: int, micro_batches: int = 2) -> RowSums:
    terms = [SumTerm(number, part, 0.25 + part + number) for part in range(2) for number in range(micro_batches)]
    return RowSums(version, tuple(terms), rows_once=(1,))


def commit(version: int, record: bytes | None = None) -> PushedCommit:
    return PushedCommit(sums(version), version, {"fixed": 0.1, "any": 0.01}, {"any": TableClip(0.5, 2.0)}, record)


def alone(versions: int) -> MemoryStore:
    """What one process makes of the same pushes."""
    store = create_tables(MemoryStore(1), *(FIXED, ANY))
    for version in range(versions):
        updates = sum_pushes(sums(version), {number: push(version, number).parts for number in range(2)})
        updates["any"] = clipped_update(updates["any"], TableClip(0.5, 2.0))
        store.commit(Commit(version + 1, updates, version, {"fixed": 0.1, "any": 0.01}))
    return store


def begin(store: StoreServers, versions: int = 0) -> None:
    create_tables(store, *(FIXED, ANY))
    begin_job(store, JOB)
    for version in range(versions):
        push_all(store, version)
        assert store.commit_pushed(commit(version)).missing == ()


def push_all(store: StoreServers, version: int) -> None:
    for number in (1, 0):  # in which order they come does not matter
        store.push_rows(push(version, number))


def assert_same_rows(store: StoreServers, versions: int) -> None:
    assert store.version() == versions
    with alone(versions) as expected:
        for table in ("fixed", "any"):
            (theirs,) = expected.scan(table)
            ours = store.read_rows(table, theirs.ids)
            np.testing.assert_array_equal(ours.ids, theirs.ids)
            np.testing.assert_array_equal(ours.weights.view(np.uint32), theirs.weights.view(np.uint32))
            np.testing.assert_array_equal(ours.slots.view(np.uint32), theirs.slots.view(np.uint32))


@pytest.mark.parametrize(("servers", "strategy"), [(1, "token"), (2, "encoding"), (3, "token")])
def test_any_number_of_servers_makes_the_rows_of_one_process(servers: int, strategy: str) -> None:
    with served(servers, strategy=strategy) as (_, store):
        begin(store)
        for version in range(3):
            push_all(store, version)
            made = store.commit_pushed(commit(version))
            assert (made.missing, made.tables, made.repeated) == ((), ("any", "fixed"), False)
        assert_same_rows(store, 3)
        assert store.commit_pushed(commit(2)).repeated
        assert_same_rows(store, 3)


@pytest.mark.parametrize("servers", [1, 3])
def test_squares_are_exact_however_rows_are_split(servers: int) -> None:
    with served(servers) as (_, store):
        begin(store)
        push_all(store, 0)
        expected = sum_pushes(sums(0), {number: push(0, number).parts for number in range(2)})
        measured = store.measure(sums(0))
        assert measured.squares == {name: exact_squares(update.gradients) for name, update in expected.items()}
        assert measured.not_finite == measured.missing == ()
        assert store.measure(replace(sums(0), frozen=("any",))).squares.keys() == {"fixed"}


def test_a_push_is_named_by_what_it_computed() -> None:
    with served(2) as (servers, store):
        begin(store)
        assert store.push_rows(push(0, 0)) is RowPushOutcome.ACCEPTED
        held = [server.shard.buffered_bytes for server in servers]
        assert store.push_rows(push(0, 0)) is RowPushOutcome.DUPLICATE
        assert [server.shard.buffered_bytes for server in servers] == held
        with pytest.raises(errors.FutureVersion, match="push for version 1; the store server is at version 0"):
            store.push_rows(push(1, 0))
        with pytest.raises(errors.JobFailed, match="is job job's; the push is of job other"):
            store.push_rows(replace(push(0, 1), job="other"))
        push_all(store, 0)
        store.commit_pushed(commit(0))
        assert store.push_rows(push(0, 0)) is RowPushOutcome.STALE


def test_what_is_missing_is_named_and_nothing_changes() -> None:
    with served(2) as (_, store):
        begin(store)
        store.push_rows(push(0, 1))
        assert store.measure(sums(0)).missing == (0,)
        assert store.commit_pushed(commit(0)).missing == (0,)
        assert store.version() == 0
        store.push_rows(push(0, 0))
        assert store.commit_pushed(commit(0)).missing == ()
        assert_same_rows(store, 1)


def test_a_server_that_lost_its_pushes_has_the_others_take_the_version_back(tmp_path: Path) -> None:
    with served(3, tmp_path) as (servers, store):
        begin(store, 2)
        push_all(store, 2)
        readers = [server.store.pin() for server in servers]  # as of a checkpoint that is being written
        stopped_with(servers, 1)
        assert store.commit_pushed(commit(2)).missing == (0, 1)
        for reader in readers:
            with pytest.raises(errors.StaleVersion, match=r"closed|went back to version 2"):
                reader.renew()
        assert [server.store.version() for server in servers] == [2, 2, 2]
        assert_same_rows(store, 2)
        # Those that were not started again have the pushes still.
        assert store.push_rows(push(2, 0)) is RowPushOutcome.ACCEPTED
        assert store.push_rows(push(2, 1)) is RowPushOutcome.ACCEPTED
        assert store.push_rows(push(2, 1)) is RowPushOutcome.DUPLICATE
        assert store.commit_pushed(commit(2)).missing == ()
        assert_same_rows(store, 3)


def test_a_server_without_a_log_cannot_go_back_and_says_so(tmp_path: Path) -> None:
    servers = [ServedShard("memory"), ServedShard(f"memory?log={tmp_path}/log")]
    try:
        with StoreServers([ShardClient(server.address, 60.0) for server in servers]) as store:
            begin(store)
            push_all(store, 0)
            stopped_with(servers, 1)
            with pytest.raises(errors.ShardLost, match=r"lost pushes of version 0, .* keeps no log"):
                store.commit_pushed(commit(0))
    finally:
        for server in servers:
            server.stop()


def test_a_server_that_lost_its_rows_is_lost() -> None:
    with served(2) as (servers, store):
        begin(store, 1)
        stopped_with(servers, 1)
        with pytest.raises(errors.ShardLost, match="shard 1 of 2 is lost"):
            store.commit_pushed(commit(1))


@pytest.mark.parametrize(
    ("number", "asked"),
    [
        (0, lambda store: store.record()),
        (1, lambda store: store.require_owner()),
        (1, lambda store: store.other_writer()),
        (1, lambda store: store.keeps_records),
        (1, lambda store: store.wait_for_version(1, 0.1)),
        (1, lambda store: store.commit_pushed(commit(0))),
    ],
    ids=["record", "owner", "other writer", "records", "wait", "commit"],
)
def test_a_server_that_is_away_is_named_whatever_is_asked(number: int, asked: Callable[[StoreServers], object]) -> None:
    with served(2) as (servers, store):
        begin(store)
        push_all(store, 0)
        servers[number].stop()
        away = store._servers[number]
        assert isinstance(away, ShardClient)
        away.connection.deadline_s = 0.5
        name = f"shard {number} of 2: {servers[number].address}"
        with pytest.raises(errors.ShardAway, match=f"{name} .* the deadline of 0.5 s"):
            asked(store)
        with pytest.raises(errors.ShardLost, match=f"{name} .*taken for lost"):
            retry(lambda: asked(store), "asking", deadline_s=0.0)
        servers[number].start()


def test_whoever_comes_after_a_master_that_died_in_mid_commit_finds_one_version(tmp_path: Path) -> None:
    with served(2, tmp_path) as (servers, store):
        begin(store)
        push_all(store, 0)
        store.commit_pushed(commit(0, b"first"))
        push_all(store, 1)
        # Only one of them heard of the commit.
        StoreServers.commit_pushed(store, commit(0, b"first"))
        first = store._servers[0]
        assert first.commit_pushed(commit(1, b"second")).missing == ()
        assert [server.store.version() for server in servers] == [2, 1]
        with StoreServers([ShardClient(server.address, 60.0) for server in servers]) as later:
            assert later.keeps_records
            assert later.recover() > 0
            assert later.record() == b"first"
            assert_same_rows(later, 1)
            begin_job(later, JOB)
            push_all(later, 1)
            assert later.commit_pushed(commit(1, b"second")).missing == ()
            assert later.record() == b"second"
            assert_same_rows(later, 2)


def test_bad_pushes_are_refused_by_name_and_nothing_of_them_is_kept() -> None:
    with served(2) as (servers, store):
        begin(store)
        good = push(0, 0).parts[0]["fixed"]
        cases: list[tuple[dict[str, Slices], type[Exception], str]] = [
            ({"none": good}, errors.TableNotFound, "none"),
            ({"fixed": Slices(np.array([50]), np.ones((1, 3), np.float32))}, errors.IdOutOfRange, "50"),
            ({"fixed": Slices(np.array([5]), np.ones((1, 2), np.float32))}, errors.BadGradient, "fixed"),
            (
                {"fixed": Slices(np.array([4, 5]), np.array([[1, 1, 1], [1, np.nan, 1]], np.float32))},
                errors.NotFinite,
                "id 5",
            ),
        ]
        for part, kind, named in cases:
            with pytest.raises(kind, match=named):
                store.push_rows(RowPush(JOB, 0, 0, (part,)))
        # A server does not trust whoever splits pushes.
        server = ShardClient(servers[0].address, 60.0)
        server.show_session(session_of(KEY, "w"))
        held = servers[0].shard.buffered_bytes  # of the push that the other server refused
        for part, kind, named in cases[:1] + cases[2:]:
            with pytest.raises(kind, match=named.replace("id 5", "id 10")):
                server.push_rows(RowPush(JOB, 0, 1, (part,)))
        with pytest.raises(errors.IdOutOfRange, match="25"):
            server.push_rows(RowPush(JOB, 0, 1, ({"fixed": Slices(np.array([25]), np.ones((1, 3), np.float32))},)))
        server.close()
        assert [server.shard.buffered_bytes for server in servers] == [held, 0]


def of_sender(sender: str, sequence: int, version: int = 0, rows: int = 40) -> RowPush:
    return replace(push(version, sequence, rows), sender=sender)


def sum_of(sender: str, sequence: int, version: int) -> RowSums:
    return RowSums(version, tuple(SumTerm(sequence, part, 1.0) for part in range(2)), sender=sender)


def test_asynchronous_pushes_count_on_any_version_and_each_replaces_the_one_before() -> None:
    with served(2) as (servers, store):
        begin(store)
        assert push_as_sender(store, of_sender("a", 1)) is RowPushOutcome.ACCEPTED
        assert push_as_sender(store, of_sender("b", 1)) is RowPushOutcome.ACCEPTED
        assert push_as_sender(store, of_sender("a", 1)) is RowPushOutcome.DUPLICATE
        held = sum(server.shard.buffered_bytes for server in servers)
        for version, sender in enumerate("ab"):  # b's was computed on version 0, and makes version 2
            made = replace(commit(version), sums=sum_of(sender, 1, version))
            assert store.commit_pushed(made).missing == ()
            assert store.commit_pushed(made).repeated
        assert sum(server.shard.buffered_bytes for server in servers) == held
        assert push_as_sender(store, of_sender("a", 2, 1)) is RowPushOutcome.ACCEPTED
        assert push_as_sender(store, of_sender("a", 1)) is RowPushOutcome.STALE
        assert sum(server.shard.buffered_bytes for server in servers) == held
        lost = replace(commit(2), sums=sum_of("a", 1, 2))
        assert store.commit_pushed(lost).missing == (1,)
        assert store.version() == 2
        with pytest.raises(errors.FutureVersion, match="push for version 3; the store server is at version 2"):
            push_as_sender(store, of_sender("c", 1, 3))
        with pytest.raises(errors.BadGradient, match="a sender named by 300 characters"):
            push_as_sender(store, of_sender("c" * 300, 1))
        expected = create_tables(MemoryStore(1), *(FIXED, ANY))
        for version, sender in enumerate("ab"):
            updates = sum_pushes(sum_of(sender, 1, version), {1: of_sender(sender, 1).parts})
            updates["any"] = clipped_update(updates["any"], TableClip(0.5, 2.0))
            expected.commit(Commit(version + 1, updates, version, {"fixed": 0.1, "any": 0.01}))
        for table in ("fixed", "any"):
            (theirs,) = expected.scan(table)
            assert store.read_rows(table, theirs.ids).weights.tobytes() == theirs.weights.tobytes()


ONCE = Slices(np.array([5]), np.full((1, 3), 3e38, np.float32))
SUMMED = Slices(np.array([5, 5]), np.full((2, 3), 3e38, np.float32))
OF_A = of_sender("a", 3)
UNFIT: dict[str, tuple[RowPush, type[Exception], str]] = {
    "a sequence of 0": (replace(OF_A, micro_batch=0), errors.BadInput, "push 0 of 'a', whose last one was 2"),
    "one far ahead": (replace(OF_A, micro_batch=2**32 + 3), errors.BadInput, "push 4294967299 of 'a'"),
    "an age beyond the first version": (
        replace(OF_A, version=-1),
        errors.BadInput,
        "version -1: the first version is 0",
    ),
    "a sum": (replace(OF_A, parts=({"fixed": SUMMED}, {})), errors.NotFinite, "summed gradient of id 5"),
    "a sum of parts": (replace(OF_A, parts=({"fixed": ONCE}, {"fixed": ONCE})), errors.NotFinite, "gradient of id 5"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_asynchronous_pushes_that_cannot_be_are_refused_by_name_and_change_nothing(what: str) -> None:
    wrong, kind, named = UNFIT[what]
    with served(1) as ((server,), store):
        begin(store)
        assert push_as_sender(store, of_sender("a", 2)) is RowPushOutcome.ACCEPTED
        held = server.shard.buffered_bytes
        client = ShardClient(server.address, 60.0)
        client.show_session(session_of(KEY, "a"))
        with pytest.raises(kind, match=named):
            client._pushes.send(wrong)
        assert server.shard.buffered_bytes == held
        assert push_as_sender(store, of_sender("a", 1)) is RowPushOutcome.STALE
        assert push_as_sender(store, of_sender("a", 3)) is RowPushOutcome.ACCEPTED


def test_pushes_of_senders_that_died_make_room_once_nobody_can_wait_for_them() -> None:
    with served(1, most_bytes=20_000) as ((server,), store):
        begin(store)
        senders = 0
        while True:  # until it is full
            try:
                push_as_sender(store, of_sender(f"dead-{senders}", 1))
            except errors.NotReady:
                break
            senders += 1
        assert senders > 3
        for version in range(16 + senders + 1):
            with pytest.raises(errors.NotReady, match="--gradient-bytes"):
                push_as_sender(store, of_sender("live", 1))
            assert store.commit_pushed(replace(commit(version), sums=RowSums(version))).missing == ()
        assert push_as_sender(store, of_sender("live", 1)) is RowPushOutcome.ACCEPTED
        assert store.measure(sum_of("dead-0", 1, store.version())).missing == (1,)
        assert store.measure(sum_of("dead-1", 1, store.version())).missing == ()
        assert server.shard.buffered_bytes <= 20_000


def test_gradients_in_flight_are_bounded() -> None:
    with served(1, most_bytes=10_000) as ((server,), store):
        begin(store)
        store.push_rows(push(0, 0))
        held = server.shard.buffered_bytes
        with pytest.raises(errors.NotReady, match=r"above its limit of 10,000.*--gradient-bytes"):
            store.push_rows(push(0, 1, rows=1_000))
        assert server.shard.buffered_bytes == held
        store.push_rows(push(0, 1))
        assert store.commit_pushed(commit(0)).missing == ()


def test_only_the_owner_changes_a_server() -> None:
    with served(1) as (servers, store):
        begin(store)
        address = servers[0].address
        with ShardClient(address, 60.0) as later:
            assert later.other_writer() is not None
            later.create_table(TableSpec("more", 2, 10))  # and so it is the owner now
            with pytest.raises(errors.TakenOver, match="belongs to"):
                store.commit_pushed(commit(0))
            with pytest.raises(errors.TakenOver):
                store.require_owner()
            with pytest.raises(errors.NotReady, match="no job has claimed"):
                later.push_rows(push(0, 0))
        with RemoteStore(address, 60.0) as stranger, pytest.raises(errors.BadInput, match="for the owner"):
            stranger.create_table(TableSpec("theirs", 2, 10))
        with ShardClient(address, 60.0) as liar:
            liar._owner.claimed = True
            with pytest.raises(errors.TakenOver):
                liar.reset_version(7)
        frame = store_pb2.RecordFrame(header=store_pb2.RecordHeader(version=7))
        with channel(address) as opened, pytest.raises(grpc.RpcError, match="show the secret of a claim"):
            store_pb2_grpc.StoreStub(opened).ResetVersion(iter([frame]), timeout=60)
        assert servers[0].store.version() == 0


@pytest.mark.parametrize("sent", [1, 2], ids=["some frames", "all frames"])
def test_rows_that_an_owner_is_still_sending_are_refused_once_another_one_has_claimed_the_server(sent: int) -> None:
    frames = SimpleQueue[bytes | None]()

    def shown(secret: bytes) -> tuple[tuple[str, bytes]]:
        return ((PROOF_KEYS[Proof.OWNER], secret),)

    block = RowBlock(np.array([1]), np.zeros((1, 2), np.float32), np.zeros((1, 0), np.float32))
    whole = store_pb2.RowBlockFrame.FromString(next(block_frames("t", block)))

    with served(1) as ((server,), _):
        server.store.create_table(TableSpec("t", 2, 50))
        with channel(server.address) as opened:
            stub = store_pb2_grpc.StoreStub(opened)
            stub.Claim(store_pb2.ClaimRequest(owner="a:1", first=True), timeout=60, metadata=shown(b"a" * 16))
            put = opened.stream_unary(f"/{STORE_SERVICE}/Put", None, None)
            answer = put.future(iter(frames.get, None), timeout=60, metadata=shown(b"a" * 16))
            parts = [store_pb2.RowBlockFrame(header=whole.header), store_pb2.RowBlockFrame(body=whole.body)]
            for part in parts[:sent]:
                frames.put(part.SerializeToString())
            until(frames.empty)
            stub.Claim(store_pb2.ClaimRequest(owner="b:2", first=True), timeout=60, metadata=shown(b"b" * 16))
            for part in parts[sent:]:
                frames.put(part.SerializeToString())
            frames.put(None)
            with pytest.raises(grpc.RpcError, match="belongs to b:2 now"):
                answer.result()
        assert server.store.row_count("t") == 0


def test_servers_in_another_order_or_number_are_refused_by_name_before_anything_changes() -> None:
    with served(2) as (servers, store):
        begin(store, 1)
        clients = [ShardClient(server.address, 60.0) for server in servers]
        with StoreServers(clients[::-1]) as swapped:
            name = rf"shard 0 of 2: store server {servers[1].address}: .* 1 of 2 by its tables \(any, fixed\)"
            with pytest.raises(errors.BadInput, match=rf"{name}, and is named as number 0 of 2: .* order of before"):
                begin_job(swapped, JOB)
        with (
            StoreServers([ShardClient(servers[0].address, 60.0)]) as fewer,
            pytest.raises(
                errors.BadInput,
                match=r"is store server 0 of 2 .*, and is named as number 0 of 1: .*elastable store rescale",
            ),
        ):
            begin_job(fewer, JOB)
        push_all(store, 1)  # of the owner of before
        store.commit_pushed(commit(1))
        assert_same_rows(store, 2)


def test_two_servers_that_come_back_at_each_others_addresses_take_nothing(tmp_path: Path) -> None:
    """Both have the version that the job is at, and would take gradients of the other's rows."""
    with served(2, tmp_path) as (servers, store):
        begin(store, 1)
        for server in servers:
            server.stop()
        one, other = servers
        one._url, other._url = other._url, one._url
        for server in servers:
            server.start()
        with pytest.raises(errors.NotReady, match="no job has claimed"):
            push_all(store, 1)
        with pytest.raises(errors.BadInput, match=f"shard 0 of 2: store server {one.address}: it is .* 1 of 2"):
            store.commit_pushed(commit(1))
        assert [server.store.version() for server in servers] == [1, 1]


def test_an_optimizer_that_looks_across_columns_is_refused_where_they_are_summed_apart() -> None:
    rows = TableSpec("t", 4, optimizer=OptimizerSpec.of("rowwise_adagrad"))
    with (
        served(2, strategy="encoding") as (_, store),
        pytest.raises(errors.Unsupported, match="needs gradients of whole"),
    ):
        store.create_table(rows)
    with served(1, strategy="encoding") as (_, store):
        assert store.create_table(rows)


def test_a_claim_as_a_number_that_there_is_not_is_refused() -> None:
    for number, count in ((2, 2), (-1, 2), (1, 0)):
        with pytest.raises(errors.BadInput, match=f"store server {number} of {count}: they are numbered from 0"):
            refuse_other_position({}, number, count)
    spec = TableSpec("t", 2, 10)
    assert position_of(spec) is None
    refuse_other_position({"t": spec}, 1, 2)  # not of store servers: whoever reads it says what it is


@pytest.mark.parametrize("whole", [FIXED, ANY, partition(ANY, "token", 3).shards[1]])
@pytest.mark.parametrize("strategy", ["token", "encoding"])
def test_the_position_of_a_shard_is_that_of_its_ids_or_columns(whole: TableSpec, strategy: str) -> None:
    for count in (1, 2, 5):
        for number, spec in enumerate(partition(whole, strategy, count).shards):
            assert spec is None or position_of(spec) == (number, count)


def test_commits_of_whole_gradients_are_refused_by_name() -> None:
    with served(1) as (_, store):
        begin(store)
        with pytest.raises(errors.Unsupported, match="versions are made of what workers push"):
            store.commit(Commit(1, {}, 0, {}))


def test_a_sum_that_names_a_part_that_is_not_there_is_refused() -> None:
    with served(1) as (_, store):
        begin(store)
        push_all(store, 0)
        with pytest.raises(errors.BadInput, match="part 2 of micro-batch 0, whose push has 2"):
            store.measure(RowSums(0, (SumTerm(0, 2, 1.0),)))


def test_commits_and_looks_go_where_a_server_is_by_now(tmp_path: Path) -> None:
    with served(2, tmp_path) as (servers, store):
        before = servers[1].address
        store.follow(lambda number: servers[number].address)
        begin(store)
        push_all(store, 0)
        store.commit_pushed(commit(0))
        servers[1].move()
        store.watch.look()  # does not reach it, and hears where it is
        store.watch.look()
        statuses = store.watch.statuses()
        assert [(each.address, each.failure) for each in statuses] == [(server.address, "") for server in servers]
        assert store.address == ",".join(server.address for server in servers) != before
        assert store.commit_pushed(commit(1)).missing  # its owner claims it again
        push_all(store, 1)
        store.commit_pushed(commit(1))
        assert_same_rows(store, 2)
        servers[0].move()  # and without a look
        assert store.commit_pushed(commit(2)).missing
        push_all(store, 2)
        store.commit_pushed(commit(2))
        assert_same_rows(store, 3)


def test_a_server_that_nobody_knows_of_is_tried_where_it_was(tmp_path: Path) -> None:
    server = ServedShard(f"memory?log={tmp_path}")
    asked: list[str] = []

    def find() -> str | None:
        asked.append(client.address)
        if len(asked) == 1:
            raise Unavailable("the registry is away")
        if len(asked) == 3:
            server.start()
        return None

    with ShardClient(server.address, 60.0) as client:
        client.follow(find)
        server.stop()
        assert client.version() == 0
        assert asked[:3] == [server.address] * 3
    server.stop()
