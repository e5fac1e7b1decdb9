"""The process that has imported everything and forks: `python -m tests.preloaded.server SOCKET`.

A connection to SOCKET asks for one process: a JSON object (see `Wanted`) on a SEQPACKET socket, with the descriptors
that it inherits. The answer is the process id, and, when the process has ended, its wait status. A client that closes
the connection before kills its process.

A child differs from `python ARGUMENTS` in one way: the modules are imported already. It has its own arguments,
environment, working directory, session and descriptors, and joins its threads and runs its exit handlers at the end.
The server has one thread and has opened no device and no channel, so a fork of it is as good as new.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Wanted", "main"]

_LARGEST_REQUEST = 1 << 20
_MOST_DESCRIPTORS = 64
_OPTIONS_WITHOUT_VALUE = ("-u", "-B")

# What libraries import at their first use; TensorBoard's summaries import the client of S3.
_LATER = (
    "PIL.Image", "fsspec.implementations.local", "matplotlib.figure", "tensorboard.summary",
    "elastable.monitoring.endpoints", "elastable.monitoring.http_server",
    "uvicorn.lifespan.off", "uvicorn.loops.asyncio", "uvicorn.protocols.http.h11_impl",
)  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """A process as a client asks for it.

    Attributes:
        arguments: Of the interpreter: `-m MODULE ...`, `-c PROGRAM ...` or `FILE ...`.
        executable: What the process finds in `sys.executable`.
        environment: All of its environment.
        folder: Its working directory.
        descriptors: The numbers that it has for the descriptors sent along; 0, 1 and 2 among them.
        new_session: Whether it leads a separate session.
    """

    arguments: list[str]
    executable: str
    environment: dict[str, str]
    folder: str
    descriptors: list[int]
    new_session: bool = False


def import_everything() -> None:
    """Imports what commands and tests' programs use, and loads the compiled kernels.

    Raises:
        RuntimeError: an import has started a thread, which a fork would not have.
    """
    from elastable.process.quiet import import_backend

    import_backend()
    import matplotlib

    import elastable.command
    import elastable.commands.job
    import elastable.jobs.master_process
    import elastable.jobs.serving
    import elastable.jobs.worker_process
    import elastable.models.trained
    from elastable.embedding_store.contract.spec import OptimizerSpec
    from elastable.embedding_store.warm import warm_lookups, warm_updates

    matplotlib.use("Agg")
    for name in _LATER:
        importlib.import_module(name)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        elastable.command.app(["train", "--help"])  # typer imports what it needs for options, pydantic among it
    warm_lookups()
    warm_updates([OptimizerSpec.of(name) for name in ("sgd", "adagrad", "adam")])
    threads = [_comm(thread) for thread in os.listdir("/proc/self/task")]
    pythons = [name for name in threads if name.startswith("python")]
    if len(pythons) > 1:
        raise RuntimeError(f"{len(pythons)} threads before the first fork: set OPENBLAS_NUM_THREADS=1")


def _comm(thread: str) -> str:
    return Path(f"/proc/self/task/{thread}/comm").read_text().strip()


class _Forks:
    """The server's loop. `run` returns in each child, with what it is to do, and in the server at its end."""

    def __init__(self, listener: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(0, selectors.EVENT_READ, self._end)
        self._processes: dict[int, int] = {}  # descriptor of the process -> its id
        self._over = False
        self._child: Wanted | None = None

    def run(self) -> Wanted | None:
        while not self._over and self._child is None:
            for key, _ in self._selector.select():
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
                if self._child is not None:
                    break
        return self._child

    def _end(self) -> None:
        """Stdin has closed: the processes that use the server are gone."""
        self._over = True
        for pid in self._processes.values():
            os.kill(pid, signal.SIGKILL)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            request, descriptors, _, _ = socket.recv_fds(client, _LARGEST_REQUEST, _MOST_DESCRIPTORS)
            wanted = Wanted(**json.loads(request))
        except (OSError, ValueError, TypeError):  # it was ended while it asked
            client.close()
            return
        pid = os.fork()
        if pid == 0:
            self._become(wanted, client, descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        self._watch(client, pid)

    def _watch(self, client: socket.socket, pid: int) -> None:
        ended = os.pidfd_open(pid)
        self._processes[ended] = pid

        def bury() -> None:
            self._selector.unregister(ended)
            self._selector.unregister(client)
            os.close(ended)
            _, status = os.waitpid(self._processes.pop(ended), 0)
            _tell(client, status)
            client.close()

        self._selector.register(ended, selectors.EVENT_READ, bury)
        self._selector.register(client, selectors.EVENT_READ, lambda: os.kill(pid, signal.SIGKILL))
        _tell(client, pid)

    def _become(self, wanted: Wanted, client: socket.socket, descriptors: list[int]) -> None:
        self._child = wanted
        # An object that closes its descriptor when it is freed would close one of the child's by then.
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        client.close()
        # Out of the way of their future numbers first; then all else that the server has open is closed.
        above = max([*wanted.descriptors, *descriptors]) + 1
        apart = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
        for number, descriptor in zip(wanted.descriptors, apart, strict=True):
            os.dup2(descriptor, number)
        low = 0
        for number in [*sorted(wanted.descriptors), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]:
            if low < number:
                os.closerange(low, number)
            low = number + 1


def _tell(client: socket.socket, number: int) -> None:
    try:
        client.send(str(number).encode())
    except OSError:  # it went before its process did
        return


def _run(wanted: Wanted) -> None:
    """As an interpreter does with these arguments."""
    if wanted.new_session:
        os.setsid()
    np.random.seed()  # forks of one process would draw the same
    os.chdir(wanted.folder)
    os.environ.clear()
    os.environ.update(wanted.environment)
    sys.executable = wanted.executable
    words = list(wanted.arguments)
    while words[0] in _OPTIONS_WITHOUT_VALUE:
        words.pop(0)
    run: Callable[[], object]
    if words[0] == "-m":
        module, sys.argv, sys.path[0] = words[1], words[1:], wanted.folder
        run = lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)  # noqa: E731
    elif words[0] == "-c":
        program, sys.argv, sys.path[0] = words[1], ["-c", *words[2:]], ""
        sys.modules["__main__"] = main_module = types.ModuleType("__main__")
        run = lambda: exec(compile(program, "<string>", "exec"), main_module.__dict__)  # noqa: E731
    else:
        file, sys.argv, sys.path[0] = words[0], words, str(Path(words[0]).resolve().parent)
        run = lambda: runpy.run_path(file, run_name="__main__")  # noqa: E731
    run()


def _exit_code(wanted: Wanted) -> int:
    """Runs it, then all that an interpreter does at its end but for tearing down modules, which takes a second."""
    code = 0
    try:
        _run(wanted)
    except SystemExit as ended:
        code = _code_of(ended)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def _code_of(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1


def main() -> None:
    (path,) = sys.argv[1:]
    import_everything()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        gc.collect()
        gc.freeze()  # a collection in a child would otherwise copy every page
        os.write(1, b"ready\n")
        wanted = _Forks(listener).run()
    if wanted is not None:
        os._exit(_exit_code(wanted))


if __name__ == "__main__":
    main()
