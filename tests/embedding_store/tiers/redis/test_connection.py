"""What one file takes of redis-py that it does not promise, and what redis-py alone would not hold: the deadline."""

import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from textwrap import dedent

import pytest
import redis

from elastable.embedding_store.errors import DeadlineExceeded
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.tiers.redis.connection import Connection, Deadline
from elastable.embedding_store.tiers.redis.url import RedisUrl
from tests.servers import Server

PRODUCT = Path(__file__).parents[4] / "embedding_store"


def test_redis_py_is_what_its_connections_are_taken_for(redis_node: Server) -> None:
    """Where this fails after an update of redis-py, `tiers/redis/connection.py` has to be changed."""
    seen: list[object] = []

    def logged_in(connection: redis.Connection) -> None:
        seen.append(connection._sock)
        connection.on_connect()

    made = redis.Connection(port=redis_node.port, protocol=2, redis_connect_func=logged_in)
    made.connect()
    assert seen == [made._sock], "TLS is put between redis-py's socket and its login: `redis_connect_func`"
    assert isinstance(made._sock, socket.socket), "rows are sent and received on `_sock`, which redis-py has renamed"
    kept = made._sock
    made.disconnect()
    assert kept.fileno() == -1, "`disconnect` closed the socket"
    refused = redis.Connection(port=redis_node.port, protocol=2, password="another")
    with pytest.raises(redis.RedisError) as error:
        refused.connect()
    refusal = error.value.status_code or isinstance(error.value, redis.ResponseError | redis.AuthenticationError)
    assert refusal, "a refused login is told from a server that is away by `status_code` and the error's class"


def test_one_file_touches_the_socket_of_redis_py() -> None:
    using = [path.name for path in PRODUCT.rglob("*.py") if re.search(r"\._sock\b", path.read_text())]
    assert using == ["connection.py"]


@pytest.mark.parametrize("login", ["", "me:secret@"])
def test_a_server_that_answers_byte_by_byte_does_not_stretch_the_deadline(login: str) -> None:
    """Each byte comes within the timeout of a step; the last would come after a minute."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            client, _ = listener.accept()
            with client:
                for byte in b"+" + b"x" * 600:
                    try:
                        client.send(bytes([byte]))
                    except OSError:
                        return
                    time.sleep(0.1)

        answering = threading.Thread(target=answer)
        answering.start()
        address, began = Address("127.0.0.1", listener.getsockname()[1]), time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"within the deadline of 0\.5 s"):
            Connection(RedisUrl.parse(f"redis://{login}{address}"), address, Deadline(0.5))
        assert time.monotonic() - began < 30
        answering.join()  # nobody listens any more


def test_a_process_that_ends_connects_once_more(redis_node: Server) -> None:
    """A store that is closed at exit may have lost its connection, and no thread starts any more then."""
    code = f"""
        import atexit
        from elastable.embedding_store.support.address import Address
        from elastable.embedding_store.tiers.redis.connection import Connection, Deadline
        from elastable.embedding_store.tiers.redis.url import RedisUrl

        address = Address("127.0.0.1", {redis_node.port})
        url = RedisUrl.parse(f"redis://{{address}}")
        atexit.register(lambda: print("connected to", Connection(url, address, Deadline(60)).address))
    """
    ended = subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == f"connected to 127.0.0.1:{redis_node.port}\n", ended.stderr
