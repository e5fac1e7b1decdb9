"""Runs the blocks of one page in their order, in a folder made for it."""

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import typer

from tests.pages.blocks import Block, blocks_of
from tests.ports import free_port
from tests.preloaded.client import preloaded_python

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0
_REDIS_HOST = re.compile(r"redis://([\w.-]+):6379")
_GRPC_HOST = re.compile(r"\b([A-Za-z][\w.-]*|127\.0\.0\.1|0\.0\.0\.0):(?:50051|8501)\b")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


class PageRun:
    """Everything that a page's blocks leave to those after them.

    `python` and `elastable` in shell blocks are forks of a process that has imported TensorFlow (`tests.preloaded`).

    Python blocks share one namespace. Shell blocks share their working directory and exported variables.
    Addresses that a page names are replaced by those of this run: every `redis://HOST:6379` by a server of its
    own, every `HOST:50051` by one free port of this machine, and one whose name ends in `-b` by another, where nothing
    listens.
    """

    def __init__(self, folder: Path, redis_server: Callable[[str], str]) -> None:
        """`redis_server` starts one server per host name and returns its URL."""
        self._folder = folder
        self._redis_server = redis_server
        self._names: dict[str, object] = {"__name__": "page"}
        self._ports = {"here": free_port(), "absent": free_port()}
        self._open = ExitStack()
        self._printed = ""
        self._working = folder
        self._exports = folder / ".exports"
        (folder / "examples").symlink_to(ROOT / "examples")

    def __enter__(self) -> "PageRun":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def run(self, page: Path) -> None:
        for block in blocks_of(page):
            self._run(block)

    def _run(self, block: Block) -> None:
        if block.kind == "together":  # it brings its own server; one of a block before may still be ending
            self._ports["here"] = free_port()
        text = self._with_addresses(block.text)
        if block.kind == "output":
            assert_printed(self._printed, text, str(block))
        elif block.kind == "file":
            (self._working / block.file).write_text(text)
        elif block.kind == "needs minutes":
            missing = missing_commands(text)
            assert not missing, f"{block} calls what is not there: {missing}"
        elif block.kind in ("sample", "diagram") or block.kind.startswith("needs "):
            return
        else:
            getattr(self, f"_run_{block.language}")(block, text)

    def _run_python(self, block: Block, text: str) -> None:
        """In this process: an error's traceback names the page and its line."""
        code = compile("\n" * block.line + text, str(block.page), "exec")
        printed = io.StringIO()
        with contextlib.chdir(self._working), contextlib.redirect_stdout(printed), _importing_from(self._working):
            exec(code, self._names)
        self._printed = printed.getvalue()

    def _run_sh(self, block: Block, text: str) -> None:
        lines = [line for line in _joined(text) if line.split("#")[0].strip()]
        if block.kind == "together":
            with ExitStack() as all_of_them:
                processes = [all_of_them.enter_context(self._process(line)) for line in lines]
                self._printed = "".join(_finished(process, block) for process in processes)
            return
        if block.kind == "serves":
            self._serve(lines.pop(0), block)
        if lines:
            with self._process("\n".join(lines), keep_state=True) as process:
                self._printed = _finished(process, block)
            self._working = Path((self._folder / ".cwd").read_text().strip())

    def _run_console(self, block: Block, text: str) -> None:
        """Lines after `$` are commands; the lines below are what each prints, in any order."""
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            with self._process(command) as process:
                printed = _finished(process, block)
            assert_printed(*("\n".join(sorted(lines.splitlines())) for lines in (printed, expected)), str(block))  # type: ignore[call-arg]

    def _run_toml(self, block: Block, text: str) -> None:
        tomllib.loads(text)

    def _run_proto(self, block: Block, text: str) -> None:
        sources = [_squeezed(file.read_text()) for file in (ROOT / "proto").rglob("*.proto")]
        assert any(_squeezed(text) in source for source in sources), f"{block} is not in proto/"

    def _serve(self, command: str, block: Block) -> None:
        process = self._open.enter_context(self._process(command, new_group=True))
        end = time.monotonic() + DEADLINE_S
        while process.poll() is None and time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._ports["here"])) == 0:
                    return
            time.sleep(0.05)
        process.kill()
        raise AssertionError(f"{block}: nothing listens after {command!r}:\n{process.communicate()}")

    @contextmanager
    def _process(
        self, script: str, keep_state: bool = False, new_group: bool = False
    ) -> Iterator[subprocess.Popen[str]]:
        text = f"{script}\nexport -p > {self._exports}\npwd > {self._folder}/.cwd\n" if keep_state else script
        before = f"[ -e {self._exports} ] && source {self._exports}\n"
        folders = f"{preloaded_python().parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": folders, "COLUMNS": "120"}
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", f"{before if self._exports.exists() else ''}cd {self._working}\n{text}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _end(process)

    def _with_addresses(self, text: str) -> str:
        text = _REDIS_HOST.sub(lambda found: self._redis_server(found[1]), text)
        return _GRPC_HOST.sub(
            lambda found: f"127.0.0.1:{self._ports['absent' if found[1].endswith('-b') else 'here']}", text
        )


def assert_printed(printed: str, expected: str, where: str) -> None:
    """Fails unless the words are equal and the numbers within 5 % (a last digit may differ from machine to machine)."""
    words, expected_words = (_NUMBER.split(_squeezed(text)) for text in (printed, expected))
    numbers, expected_numbers = (list(map(float, _NUMBER.findall(_squeezed(text)))) for text in (printed, expected))
    close = all(abs(one - other) <= 0.05 * abs(other) for one, other in zip(numbers, expected_numbers, strict=False))
    message = f"{where}: the page says\n{expected}\nand what ran printed\n{printed}"
    assert words == expected_words, message
    assert close, message


def missing_commands(text: str) -> list[str]:
    """Make targets, commands, modules and scripts that the lines call and that do not exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = []
    for line in _joined(text):
        words = line.split("#")[0].split()
        if not words:
            continue
        if words[0] == "make":
            known = words[1] in targets
        elif words[0] == "elastable":
            known = _is_command(words[1:])
        elif words[0] == "curl":
            known = True
        elif words[:2] == [".venv/bin/python", "-m"]:
            path = ROOT / words[2].replace(".", "/")
            known = path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
        else:
            known = (ROOT / words[0]).is_file()
        if not known:
            missing.append(" ".join(words))
    return missing


def _is_command(words: Sequence[str]) -> bool:
    """Whether `elastable` has such a command, with these options."""
    from elastable.command import app

    command: Any = typer.main.get_command(app)
    known = set[str]()
    for word in words:
        known |= {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        if word.startswith("--") and word.partition("=")[0] not in known:
            return False
        command = getattr(command, "commands", {}).get(word, command)
    return command.name not in (None, "elastable")


def _joined(text: str) -> list[str]:
    return text.replace("\\\n", "").splitlines()


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _finished(process: subprocess.Popen[str], block: Block) -> str:
    printed, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, f"{block} ended with code {process.returncode}:\n{printed}\n{errors}"
    return printed


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(DEADLINE_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Modules of the folder can be imported, as in an interpreter that was started there; they are forgotten."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
                del sys.modules[name]
