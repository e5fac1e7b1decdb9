"""What processes use, counted from outside."""

import os
import socket
import subprocess
import sys
import time

import pytest

from benchmarks.processes import busy_s, moved_bytes, processor_s

SENT, ANSWERED = 123_456, 7
PROGRAM = """
import socket, sys
one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
one.sendall(b"x" * int(sys.argv[2]))
one.recv(64)
sys.stdin.read()
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_bytes_of_the_connections_of_another_process_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", PROGRAM, str(server.getsockname()[1]), str(SENT)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            one, _ = server.accept()
            with one:
                received = 0
                while received < SENT:
                    received += len(one.recv(1 << 16))
                one.sendall(b"y" * ANSWERED)
                give_up = time.monotonic() + 60
                while (moved := moved_bytes(process.pid)) < SENT + ANSWERED and time.monotonic() < give_up:
                    time.sleep(0.01)
                process.kill()
    # One more: the acknowledgement of the connection itself.
    assert SENT + ANSWERED <= moved <= SENT + ANSWERED + 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processor_time_grows_with_work() -> None:
    used, busy = processor_s([os.getpid()]), busy_s()
    began = time.process_time()
    while time.process_time() - began < 0.2:
        pass
    assert processor_s([os.getpid()]) - used >= 0.15
    assert busy_s() - busy >= 0.15
