"""Data sets of many files: globs, folders, partitions in folders' names, URLs."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.fs as arrow_fs
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.batch.reader import Reader
from elastable.worker.readers.formats.csv_reader import CsvReader
from elastable.worker.readers.formats.parquet_reader import ParquetReader
from tests.contracts.readers import FORMATS
from tests.untyped import Keyword

FILES = {"day=2/b": (6, 9), "day=1/a": (0, 6), "day=10/c": (9, 20)}
"""Path without its suffix -> records first .. last; in the order of their paths those of day 1, 10 and 2."""
IN_ORDER = [*range(6), *range(9, 20), *range(6, 9)]
DAYS = [1] * 6 + [10] * 11 + [2] * 3


def table(first: int, last: int) -> pa.Table:
    numbers = np.arange(first, last)
    return pa.table({"user": 2**53 + 1 + numbers, "price": numbers / 4, "late": numbers % 2})


def write(kind: str, rows: pa.Table, target: object) -> None:
    FORMATS[kind].write(rows, target)


def reader_of(kind: str, paths: Any, **more: Keyword) -> Reader:
    return FORMATS[kind].reader(paths, label="late", **FORMATS[kind].small_blocks, **more)


def fill(folder: Path, kind: str) -> Path:
    for name, (first, last) in FILES.items():
        path = folder / f"{name}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(kind, table(first, last), path)
    (folder / "_SUCCESS").touch()
    for hidden in (".crc/x.crc", f"_temporary/day=1/c.{kind}", f"day=1/.b.{kind}", f"day=10/_c.{kind}"):
        (folder / hidden).parent.mkdir(parents=True, exist_ok=True)
        write(kind, table(0, 6), folder / hidden)
    return folder


def holds(reader: Reader, numbers: list[int], days: list[int] | None = None) -> None:
    """That the reader's records are these, in this order, and that any of them can be fetched."""
    assert len(reader) == len(numbers)
    rows = np.random.default_rng(0).integers(0, len(numbers), 50)
    for taken in (np.arange(len(numbers)), rows):
        x, y = reader.take(taken)
        expected = np.array(numbers)[taken]
        assert x["user"].dtype == np.int64
        np.testing.assert_array_equal(x["user"], 2**53 + 1 + expected)
        np.testing.assert_array_equal(x["price"], np.float32(expected / 4))
        np.testing.assert_array_equal(y, expected % 2)
        if days is not None:
            assert x["day"].dtype == np.int64
            np.testing.assert_array_equal(x["day"], np.array(days)[taken])


KINDS = pytest.mark.parametrize("kind", FORMATS)


@KINDS
def test_a_folder_of_partitions(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "clicks", kind)
    holds(reader_of(kind, tmp_path / "clicks"), IN_ORDER, DAYS)
    monkeypatch.chdir(tmp_path)
    holds(reader_of(kind, "clicks/"), IN_ORDER, DAYS)
    texts = reader_of(kind, "clicks", column_types={"day": "string"}).take(np.array([6]))[0]["day"]
    assert texts.tolist() == ["10"]


@KINDS
def test_globs_and_several_paths(tmp_path: Path, kind: str) -> None:
    fill(tmp_path, kind)
    holds(reader_of(kind, f"{tmp_path}/day=1*/*.{kind}"), IN_ORDER[:17], DAYS[:17])
    holds(reader_of(kind, f"{tmp_path}/**/[bc].{kind}"), IN_ORDER[6:], DAYS[6:])
    holds(reader_of(kind, tmp_path / f"day=?/[!b].{kind}"), IN_ORDER[:6], DAYS[:6])
    two = [tmp_path / f"day=2/b.{kind}", f"{tmp_path}/day=1/*.{kind}"]
    holds(reader_of(kind, two), [*range(6, 9), *range(6)])


@KINDS
def test_a_partition_alone_is_a_target(tmp_path: Path, kind: str) -> None:
    fill(tmp_path, kind)
    made = FORMATS[kind].reader(tmp_path, ["price"], "day")
    x, y = made.take(np.array([19, 0]))
    assert (list(x), y.tolist()) == (["price"], [2, 1])


@KINDS
def test_what_is_wrong_with_a_folder_is_named(tmp_path: Path, kind: str) -> None:
    folder = fill(tmp_path / "clicks", kind)
    with pytest.raises(BadInput, match="no file matches"):
        reader_of(kind, f"{folder}/*.{kind}")
    (folder / "empty").mkdir()
    with pytest.raises(BadInput, match="an empty folder"):
        reader_of(kind, folder / "empty")
    (folder / "README.md").touch()
    with pytest.raises(BadInput, match=rf"README\.md in this folder does not end in \.{kind}.*/\*\*/\*\.{kind}"):
        reader_of(kind, folder)
    write(kind, table(0, 1), folder / f"stray.{kind}")
    with pytest.raises(BadInput, match=rf"stray\.{kind}: its folders name no column, those of .* day"):
        reader_of(kind, f"{folder}/**/*.{kind}")


@pytest.mark.parametrize(
    ("value", "message"),
    [("99999999999999999999", "beyond int64"), ("__HIVE_DEFAULT_PARTITION__", "nulls in a column")],
)
def test_folders_whose_values_make_no_ids(tmp_path: Path, value: str, message: str) -> None:
    (tmp_path / f"user={value}").mkdir()
    pq.write_table(pa.table({"late": [1.0]}), tmp_path / f"user={value}" / "a.parquet")
    with pytest.raises(BadInput, match=message):
        ParquetReader(tmp_path, label="late").take(np.array([0]))


# Elsewhere


class Ranges(SimpleHTTPRequestHandler):
    """As every web server of files: parts of a file are given, too."""

    def do_GET(self) -> None:
        wanted = self.headers.get("Range", "").removeprefix("bytes=")
        path = Path(self.translate_path(self.path))
        if not wanted or not path.is_file():
            super().do_GET()
            return
        first, _, last = wanted.partition("-")
        content = path.read_bytes()
        part = content[int(first) : int(last) + 1 if last else None]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def web_server(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_what_a_file_system_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(memory, "info", lambda path, **_: 1 / 0)
    with pytest.raises(BadInput, match=r"CSV: a/b\.csv: cannot be listed: .*division by zero"):
        CsvReader("a/b.csv", filesystem=memory)


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[arrow_fs.S3FileSystem, str]]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        options = {"endpoint_override": f"{host}:{port}", "scheme": "http", "region": "us-east-1"}
        made = arrow_fs.S3FileSystem(access_key="key", secret_key="secret", allow_bucket_creation=True, **options)
        yield made, "&".join(f"{name}={value}" for name, value in options.items())
    finally:
        server.stop()


@KINDS
@pytest.mark.parametrize("where", ["memory", "http", "s3"])
def test_files_elsewhere(tmp_path: Path, kind: str, where: str, request: pytest.FixtureRequest) -> None:
    fill(tmp_path, kind)
    end, given, folder = "", dict[str, Any](), f"{kind}-clicks"
    with ExitStack() as held:
        if where == "http":
            url = held.enter_context(web_server(tmp_path))
        elif where == "memory":
            url, given = f"memory://{folder}", {"filesystem": fsspec.filesystem("memory")}
            given["filesystem"].put(str(tmp_path), f"/{folder}", recursive=True)
        else:
            server, options = request.getfixturevalue("s3")
            server.create_dir(folder)
            arrow_fs.copy_files(str(tmp_path), folder, destination_filesystem=server)
            url, end, given = f"s3://key:secret@{folder}", f"?{options}", {"filesystem": server}
        holds(reader_of(kind, f"{url}/day=1/a.{kind}{end}"), IN_ORDER[:6])
        holds(reader_of(kind, f"{url}/day=1*/*.{kind}{end}"), IN_ORDER[:17], DAYS[:17])
        if given:  # a web server lists no folders
            holds(reader_of(kind, url + end), IN_ORDER, DAYS)
            holds(reader_of(kind, f"{folder}/day=1/a.{kind}", **given), IN_ORDER[:6])
        with pytest.raises(BadInput, match=rf"{where}://.*nothing\.{kind}.*: no such file"):
            reader_of(kind, f"{url}/nothing.{kind}{end}")


@pytest.mark.parametrize(
    ("url", "message"),
    [("az://account/x.csv", "no file system opens this URL: .*adlfs"), ("nowhere://x.csv", "nowhere://x.csv: no file")],
)
def test_urls_that_nothing_opens(url: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        CsvReader(url)
    with pytest.raises(BadInput, match="filesystem=7: give a pyarrow"):
        CsvReader("x.csv", filesystem=7)


def test_a_page_that_was_damaged_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(
        pa.table({"user": np.arange(1000)}), path, write_page_checksum=True, compression="none", use_dictionary=False
    )
    content = bytearray(path.read_bytes())
    content[content.index(np.arange(500, 503).tobytes())] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(BadInput, match=r"row group 0 cannot be read: .*(CRC|crc|checksum)"):
        ParquetReader(path).take(np.array([0]))


def test_compressed_csv_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(BadInput, match=r"t\.csv\.gz: is compressed, and records are fetched by number"):
        CsvReader(tmp_path / "t.csv.gz")
