"""What a call to a server of a job shows: each attack at a real one, by a client that knows all but the secrets."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import NotJoined, PermissionDenied
from elastable.embedding_store.shards.ownership import session_of
from elastable.embedding_store.shards.server_contract import RowPushOutcome
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from elastable.embedding_store.wire.access.credentials import PROOF_KEYS, Proof, Role, Rule, rule_of_call
from elastable.embedding_store.wire.channels.server_connection import channel
from elastable.embedding_store.wire.channels.status_codes import ERROR_KEY
from elastable.embedding_store.wire.pushes.remote_store import ShardClient
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.master.api import JobSpec
from elastable.master.commits.dense_part import DensePart
from elastable.master.core.job_master import Master
from elastable.master.rpc.master_service import master_service
from tests.embedding_store.serving import client_service
from tests.embedding_store.shards.served_shards import KEY, begin_job, served
from tests.embedding_store.shards.test_store_servers import (
    JOB,
    assert_same_rows,
    begin,
    commit,
    of_sender,
    push,
    push_all,
)
from tests.embedding_store.wire.test_roles import methods

PAGE = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
WRONG = {
    "nothing": (),
    "a guess": (b"a guess of 16 by",),
    "another key": (session_of(bytes(32), "w"),),
    "another name": (session_of(KEY, "w")[:32] + b"v",),
    "a part": (session_of(KEY, "w")[:31],),
    "no text": (session_of(KEY, "w")[:32] + b"\xff",),
    "two": (session_of(KEY, "w"), session_of(KEY, "w")),
}


def pushed(address: str, header: store_pb2.RowPushHeader, *sessions: bytes) -> store_pb2.RowPushReply:
    """A push as a program in any language makes it, from the .proto file alone."""
    shown = tuple((PROOF_KEYS[Proof.SESSION], session) for session in sessions)
    with channel(address) as opened:
        stub = store_pb2_grpc.StoreStub(opened)
        return stub.PushRows(iter([store_pb2.RowPushFrame(header=header)]), timeout=60, metadata=shown)


def empty(micro_batch: int, sender: str = "") -> store_pb2.RowPushHeader:
    """A push without a row, in the place of an honest one."""
    parts = [store_pb2.RowPart(), store_pb2.RowPart()]
    return store_pb2.RowPushHeader(job=JOB, version=0, micro_batch=micro_batch, sender=sender, parts=parts)


def named(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call)
    return str(dict(error.trailing_metadata() or ())[ERROR_KEY])


@pytest.mark.parametrize("what", WRONG)
def test_a_push_of_whoever_has_not_joined_takes_nobodys_place(what: str) -> None:
    with served(2) as (servers, store):
        begin(store)
        for server in servers:
            for number in range(2):
                with pytest.raises(grpc.RpcError, match="has not joined job job") as caught:
                    pushed(server.address, empty(number), *WRONG[what])
                assert named(caught.value) == "NotJoined"
        assert [server.shard.buffered_bytes for server in servers] == [0, 0]
        assert [store.push_rows(push(0, number)) for number in range(2)] == [RowPushOutcome.ACCEPTED] * 2
        assert store.commit_pushed(commit(0)).missing == ()
        assert_same_rows(store, 1)


def test_a_worker_pushes_in_its_own_name_alone() -> None:
    with served(1) as ((server,), store):
        begin(store)
        with pytest.raises(PermissionDenied, match="worker 'v' is another session's: this one is of worker 'w'"):
            store.push_rows(of_sender("v", 7))
        assert store.push_rows(of_sender("w", 7)) is RowPushOutcome.ACCEPTED
        with pytest.raises(grpc.RpcError) as caught:
            pushed(server.address, empty(8, "w"), session_of(KEY, "v"))
        assert named(caught.value) == "PermissionDenied"
        assert store.push_rows(of_sender("w", 7)) is RowPushOutcome.DUPLICATE


def test_terms_of_a_job_are_its_masters() -> None:
    with served(1) as ((server,), store):
        begin(store)
        header = empty(0)
        header.terms.summed = True
        with pytest.raises(grpc.RpcError, match="terms are for a parameter server") as caught:
            pushed(server.address, header, session_of(KEY, "w"))
        assert (named(caught.value), server.shard.buffered_bytes) == ("BadInput", 0)


def test_whoever_joined_the_master_before_joins_the_one_that_owns_the_server_now() -> None:
    """And not even a push that was under way as the server was claimed is taken."""
    with served(1) as ((server,), store), ShardClient(server.address, 60.0) as later:
        begin(store)
        check = server.shard._check

        def check_and_claim(checked: object) -> None:
            check(checked)  # type: ignore[arg-type]
            later.begin_job(JOB, may_overflow=False, session_key=b"of the next master")

        server.shard._check = check_and_claim  # type: ignore[method-assign, assignment]
        for _ in range(2):
            with pytest.raises(NotJoined, match="join again"):
                store.push_rows(push(0, 0))
        server.shard._check = check  # type: ignore[method-assign]
        later.show_session(session_of(b"of the next master", "w"))
        assert later.push_rows(push(0, 0)) is RowPushOutcome.ACCEPTED


def test_a_server_that_was_started_again_knows_the_workers_of_before(tmp_path: Path) -> None:
    with served(1, tmp_path) as ((server,), store):
        begin(store, 1)
        server.stop()
        server.start()
        store.require_owner()  # as `elastable master` says every second
        push_all(store, 1)
        assert store.commit_pushed(commit(1)).missing == ()


def test_a_job_without_a_key_is_not_begun() -> None:
    with served(1) as ((server,), _), channel(server.address) as opened:
        for key in (b"", b"short", bytes(65)):
            claim = store_pb2.ClaimRequest(owner="a:1", job=JOB, first=True, session_key=key)
            owner = ((PROOF_KEYS[Proof.OWNER], bytes(16)),)
            with pytest.raises(grpc.RpcError, match="a session_key of 16 to 64 bytes"):
                store_pb2_grpc.StoreStub(opened).Claim(claim, timeout=60, metadata=owner)


def test_no_log_shows_the_key_of_a_job(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"), served(1) as (_, store):
        store.begin_job(JOB, False, b"0123456789-secret")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "elastable.audit"]
    assert 'job: "job"' in line
    assert "0123456789" not in caplog.text


# -- who may call what, of every call


def test_every_call_of_the_protocol_says_what_it_shows() -> None:
    for method in methods():
        call = descriptor_pool.Default().FindMethodByName(method.strip("/").replace("/", "."))
        assert call.GetOptions().Extensions[store_pb2.proof], f"{method}: say its proof in proto/"


@pytest.fixture(scope="module")
def of_job() -> Iterator[dict[str, str]]:
    """A store server and the master of a job: their addresses by service. Everybody is an administrator there."""
    with ExitStack() as held:
        (server,), store = held.enter_context(served(1))
        begin_job(store, JOB)
        master = Master(JobSpec(train_records=9), held.enter_context(MemoryStore(1)), DensePart())
        of_master = held.enter_context(
            GrpcServer("127.0.0.1:0", [master_service(master)], anonymous=Role.ADMINISTRATOR)
        )
        yield {"Store": server.address, "Master": of_master.address}


REFUSED = {
    Proof.NONE: "ended before its",  # let through: there is no message
    Proof.SESSION: "joined",
    Proof.OWNER: "show the secret of a claim",
}


@pytest.mark.parametrize("method", methods())
def test_an_administrator_who_does_not_show_it_makes_no_call_of_a_job(of_job: dict[str, str], method: str) -> None:
    """Before a message is read: none is sent."""
    refused = pytest.raises(grpc.RpcError, match=REFUSED[rule_of_call(method).proof])
    with channel(of_job[method.split("/")[1].rpartition(".")[2]]) as opened, refused:
        list(opened.stream_stream(method, None, None)(iter(()), timeout=60))


def test_outside_a_job_the_role_decides() -> None:
    with MemoryStore() as store, GrpcServer("127.0.0.1:0", [client_service(store)]) as server:
        header = empty(1, "anybody")
        header.job = ""
        assert pushed(server.address, header).outcome == store_pb2.RowPushReply.OUTCOME_ACCEPTED


SHOWN = {"nothing": Proof.NONE, "its session": Proof.SESSION, "its claim": Proof.OWNER}


def test_the_page_lists_every_call_with_its_role_and_what_it_shows() -> None:
    table = PAGE[PAGE.index("| service | calls | role | shows within a job |") :].split("\n\n")[0].splitlines()[2:]
    listed: dict[str, Rule] = {}
    for row in table:
        service, calls, role, shows = (cell.strip() for cell in row.strip("|").split("|"))
        for call in re.findall(r"`(\w+)`", calls):
            assert listed.setdefault(f"{service}/{call}", rule := Rule(Role[role.upper()], SHOWN[shows])) is rule
    assert listed == {method.rpartition(".")[2]: rule_of_call(method) for method in methods()}
