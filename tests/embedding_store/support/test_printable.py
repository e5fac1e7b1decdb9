import grpc
import pytest

from elastable.embedding_store import MemoryStore, RemoteSource
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE
from elastable.embedding_store.wire.server.grpc_server import GrpcServer, Service
from elastable.embedding_store.wire.service.store_service import store_service


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, größer, 無", "plain, größer, 無"),
        ("\x1b[2J\x1b]0;title\x07gone", r"\x1b[2J\x1b]0;title\x07gone"),
        ("back\rover\x08", r"back\rover\x08"),
        ("one\n2026-01-01 INFO forged\n", "one\n    2026-01-01 INFO forged"),
        ("turned\u202eround\u200b", r"turned\u202eround\u200b"),
        ("c1 \x9b31m", r"c1 \x9b31m"),
        ("half \ud800", r"half \ud800"),
        ("tab\tstays", "tab\tstays"),
    ],
)
def test_what_a_terminal_would_obey_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_names_have_one_line_and_long_text_is_cut() -> None:
    assert printable("a\nb", lines=False) == r"a\nb"
    assert printable("x" * 100, 10) == "xxxxxxxxxx... (100 characters)"


def test_what_a_server_says_is_made_fit_for_a_terminal() -> None:
    def lie(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata((("elastable-error", "BadInput"),))
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no \x1b[31m such\nlog line")
        return b""

    service = store_service(MemoryStore(1))
    handlers = dict(service.handlers)
    handlers["GetStoreStatus"] = grpc.unary_unary_rpc_method_handler(lie)
    with (
        GrpcServer("127.0.0.1:0", [Service(STORE_SERVICE, handlers, waiting=service.waiting)]) as server,
        RemoteSource(server.address, 60) as source,
        pytest.raises(BadInput) as caught,
    ):
        source.specs()
    assert str(caught.value) == "no \\x1b[31m such\nlog line"
