"""Downloads of published graphs, from servers of this host: checked, bounded, and all or nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastable.command import app
from elastable.embedding_store.errors import BadInput, DeadlineExceeded, Unavailable
from elastable.replicas.knowledge_graphs.graph.downloads import fetch as fetching
from elastable.replicas.knowledge_graphs.graph.downloads import published
from elastable.replicas.knowledge_graphs.graph.downloads.download import download_graph, read_checksums
from elastable.replicas.knowledge_graphs.graph.downloads.fetch import Checksum, fetch, require_safe_url
from elastable.replicas.knowledge_graphs.graph.downloads.published import (
    PUBLISHED_GRAPHS,
    PublishedFile,
    PublishedGraph,
)
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import load_graph

SHARED = Path(__file__).parents[5] / "shared" / "data"

FILES = {
    "train.txt": b"a\tr\tb\nb\tr\tc\nc\ts\ta\n",
    "valid.txt": b"a\ts\tc\n",
    "test.txt": b"c\tr\tb\n",
}
TOY = PublishedGraph(
    "toy",
    "https://nowhere.invalid/",
    tuple(PublishedFile(name, Checksum.of(content, "md5")) for name, content in FILES.items()),
    entities=3, relations=2, train=3, valid=1, test=1, terms="a test's",
)  # fmt: skip

Handle = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """An HTTP server of this host; what it answers may be changed by path."""

    def __init__(self) -> None:
        self.answers: dict[str, Handle] = {f"/{name}": self.sends(content) for name, content in FILES.items()}
        self.asked: list[str] = []
        self.released = threading.Event()
        served = self

        class _Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                served.asked.append(self.path)
                answer = served.answers.get(self.path)
                if answer is None:
                    self.send_error(404)
                else:
                    answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()

    @staticmethod
    def sends(content: bytes, length: int | None = None) -> Handle:
        """Answers with these bytes, and this Content-Length; -1: none."""

        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            if length != -1:
                handler.send_header("Content-Length", str(len(content) if length is None else length))
            handler.end_headers()
            handler.wfile.write(content)

        return answer

    def close(self) -> None:
        self.released.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def test_a_graph_is_downloaded_checked_and_written(server: Server, tmp_path: Path) -> None:
    said: list[str] = []
    download_graph(TOY, tmp_path / "new" / "toy", url=server.url, tell=said.append)
    folder = tmp_path / "new" / "toy"
    assert {file.name for file in folder.iterdir()} == {*FILES, "SHA256SUMS"}
    assert all((folder / name).read_bytes() == content for name, content in FILES.items())
    graph = load_graph(folder)
    assert (len(graph.entities), len(graph.train), graph.name) == (3, 3, "toy")
    assert read_checksums(folder / "SHA256SUMS") == {name: Checksum.of(content) for name, content in FILES.items()}
    assert len(said) == 3
    assert list((tmp_path / "new").iterdir()) == [folder]  # nothing else is left


def test_an_existing_folder_is_refused_before_anything_is_fetched(server: Server, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="exists; a graph is downloaded into a new folder"):
        download_graph(TOY, tmp_path, url=server.url)
    assert server.asked == []


def _refused(server: Server, home: Path, told: str, graph: PublishedGraph = TOY, **more: object) -> None:
    with pytest.raises((BadInput, Unavailable), match=told):
        download_graph(graph, home / "toy", url=server.url, **more)  # type: ignore[arg-type]
    assert list(home.iterdir()) == []


def test_a_file_of_another_checksum_is_refused_and_nothing_is_left(server: Server, tmp_path: Path) -> None:
    server.answers["/test.txt"] = server.sends(FILES["test.txt"].replace(b"c", b"a"))
    _refused(server, tmp_path, r"test\.txt: its md5 checksum is .*; it should be")


def test_files_without_a_published_checksum_are_compared_with_an_earlier_download(
    server: Server, tmp_path: Path
) -> None:
    unknown = replace(TOY, files=tuple(PublishedFile(name) for name in FILES))
    earlier = {name: Checksum.of(content) for name, content in FILES.items()}
    (home := tmp_path / "home").mkdir()
    download_graph(unknown, tmp_path / "first", url=server.url, checksums=earlier)
    server.answers["/valid.txt"] = server.sends(b"a\ts\tb\n")  # as many triples, but others
    _refused(server, home, r"valid\.txt: its sha256 checksum is", unknown, checksums=earlier)


def test_a_graph_of_other_numbers_than_its_papers_is_refused(server: Server, tmp_path: Path) -> None:
    larger = replace(TOY, files=tuple(PublishedFile(name) for name in FILES), entities=4)
    _refused(server, tmp_path, "toy was published with 4 entities, .*; downloaded were 3 entities", larger)


@pytest.mark.parametrize("length", [None, -1])
def test_a_file_has_at_most_so_many_bytes(server: Server, tmp_path: Path, length: int | None) -> None:
    server.answers["/train.txt"] = server.sends(b"x" * 5000, length)
    small = replace(TOY, files=(replace(TOY.files[0], checksum=None, most_bytes=4999),))
    _refused(server, tmp_path, "has 5000 bytes; at most" if length is None else "has more than the 4,999 bytes", small)


def test_a_file_that_is_not_there_or_breaks_off_is_refused(server: Server, tmp_path: Path) -> None:
    server.answers["/train.txt"] = server.sends(FILES["train.txt"][:5], len(FILES["train.txt"]))
    _refused(server, tmp_path, r"train\.txt: (broke off after 5 of|cannot be fetched)")
    del server.answers["/train.txt"]
    _refused(server, tmp_path, r"train\.txt: cannot be fetched \(HTTP Error 404")


def test_a_server_that_is_away_or_says_nothing_holds_nobody_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_SILENCE_S", 0.2)

    def silent(_: BaseHTTPRequestHandler) -> None:
        server.released.wait()

    server.answers["/silent"] = silent
    with pytest.raises(DeadlineExceeded, match="/silent: no answer"):
        fetch(f"{server.url}/silent", 10)
    away = Server()
    away.close()
    with pytest.raises(Unavailable, match="cannot be fetched"):
        fetch(f"{away.url}/train.txt", 10)


def test_a_file_that_trickles_ends_with_the_deadline(server: Server) -> None:
    def trickle(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        with suppress(OSError):  # until the client has hung up
            while not server.released.is_set():
                handler.wfile.write(b"x")

    server.answers["/train.txt"] = trickle
    with pytest.raises(DeadlineExceeded, match=r"train\.txt: (has not come in time|no answer)"):
        fetch(f"{server.url}/train.txt", 1 << 40, deadline_s=0.5)


@pytest.mark.parametrize(
    "url", ["http://example.org/", "ftp://127.0.0.1/", "file:///etc/passwd", "train.txt", "https:///x", "http://[::1"]
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(BadInput, match=r"graphs are fetched by https|is no URL"):
        require_safe_url(url)
    with pytest.raises(BadInput, match=r"graphs are fetched by https|is no URL"):
        fetch(url, 10)


@pytest.mark.parametrize("target", ["file:///etc/hostname", "http://example.org/train.txt", "ftp://127.0.0.1/x"])
def test_a_redirection_elsewhere_is_not_followed(server: Server, target: str) -> None:
    def away(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", target)
        handler.end_headers()

    server.answers["/train.txt"] = away
    with pytest.raises((BadInput, Unavailable), match=r"graphs are fetched by https|not allowed"):
        fetch(f"{server.url}/train.txt", 10)


def test_proxies_are_not_asked_about_this_host(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1/")
    assert fetch(f"{server.url}/train.txt", 1000) == FILES["train.txt"]


@pytest.mark.parametrize(
    ("text", "told"),
    [("0123  train.txt\n", "line 1: '0123' is no sha256"), (f"{'a' * 64}  x\n{'b' * 64}\n", "line 2: .* without")],
)
def test_malformed_checksums_are_refused_by_line(tmp_path: Path, text: str, told: str) -> None:
    (file := tmp_path / "SHA256SUMS").write_text(text)
    with pytest.raises(BadInput, match=told):
        read_checksums(file)
    with pytest.raises(BadInput, match="known are sha256, md5"):
        Checksum("crc32", "0")


def test_the_command(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "PUBLISHED_GRAPHS", {**PUBLISHED_GRAPHS, "toy": TOY})
    run = CliRunner()
    done = run.invoke(app, ["kg", "download", "Toy", str(tmp_path / "toy"), "--url", server.url])
    assert done.exit_code == 0, done.output
    assert "3 entities, 3 triples" in done.output
    again = ["kg", "download", "toy", str(tmp_path / "2"), "--url", server.url, "--checksums"]
    assert run.invoke(app, [*again, str(tmp_path / "toy" / "SHA256SUMS")]).exit_code == 0
    unknown = run.invoke(app, ["kg", "download", "toyz", str(tmp_path / "3"), "--url", server.url])
    assert "known are fb15k-237, wn18rr, codex-s, codex-m, codex-l, toy" in str(unknown.exception)
    wrong = run.invoke(app, ["kg", "download", "wn18rr", str(tmp_path / "3"), "--url", server.url])
    assert "its sha256 checksum is" in str(wrong.exception)
    assert not (tmp_path / "3").exists()


@pytest.mark.skipif(not SHARED.is_dir(), reason="the graphs of ../shared/data are not here")
@pytest.mark.parametrize("name", ["codex-s", "wn18rr"])
def test_the_published_checksums_are_those_of_the_graphs(server: Server, tmp_path: Path, name: str) -> None:
    for file in (SHARED / name).iterdir():
        server.answers[f"/{file.name}"] = server.sends(file.read_bytes())
    download_graph(PUBLISHED_GRAPHS[name], tmp_path / name, url=server.url)
    assert {file.name for file in (SHARED / name).iterdir()} < {file.name for file in (tmp_path / name).iterdir()}


@pytest.mark.parametrize("graph", PUBLISHED_GRAPHS.values(), ids=list(PUBLISHED_GRAPHS))
def test_published_graphs_have_their_splits_at_an_https_folder(graph: PublishedGraph) -> None:
    assert graph.url.startswith("https://")
    assert graph.url.endswith("/")
    assert {"train.txt", "valid.txt", "test.txt"} <= {file.name for file in graph.files}
