"""`elastable log` shows what a log holds, finds what is corrupt, and cuts it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from elastable.command import app
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput, StaleVersion, StoreBroken, StoreFailed
from elastable.embedding_store.open_store import open_store


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["log", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path) -> str:
    folder = tmp_path / "log"
    with open_store(f"memory?log={folder}") as store:
        store.create_table(TableSpec("t", 2))
        for version in range(1, 6):
            update = TableUpdate(np.arange(version), np.ones((version, 2), np.float32))
            store.commit(Commit(version, {"t": update}, version - 1, {}))
    return str(folder)


def test_a_log_is_shown(folder: str) -> None:
    told = json.loads(run("show", folder, "--json"))
    assert told == {
        "base": None,
        "base_version": 0,
        "base_bytes": 0,
        "first": 1,
        "last": 6,
        "version": 5,
        "bytes": sum(path.stat().st_size for path in Path(folder).glob("*.log")),
        "torn_bytes": 0,
        "changes": {"CreateTable": 1, "CommitImages": 5},
        "rows": 15,
    }
    shown = run("show", folder)
    assert "CommitImages" in shown
    assert "1 to 6" in shown


def test_a_log_is_verified_while_a_store_has_it_open(folder: str) -> None:
    with open_store(f"memory?log={folder}"):
        assert run("verify", folder) == "whole: entries 1 to 6, version 5\n"


def test_a_torn_entry_is_reported_and_stays(folder: str) -> None:
    (newest,) = Path(folder).glob("*.log")
    content = newest.read_bytes()
    newest.write_bytes(content + b"torn")
    assert "4 bytes of a torn entry will be dropped" in run("verify", folder)
    assert newest.read_bytes() == content + b"torn"


def test_a_corrupt_log_is_named(folder: str) -> None:
    (newest,) = Path(folder).glob("*.log")
    content = bytearray(newest.read_bytes())
    content[60] ^= 1
    newest.write_bytes(content)
    with pytest.raises(StoreBroken, match=f"{newest.name} is corrupt at byte 0"):
        run("verify", folder)


def test_what_is_no_log_is_refused_and_stays_empty(tmp_path: Path) -> None:
    for command in (("show",), ("verify",), ("truncate", "--version", "1")):
        with pytest.raises(BadInput, match="holds no log"):
            run(command[0], str(tmp_path), *command[1:])
    assert not list(tmp_path.iterdir())
    with pytest.raises(StoreFailed, match="cannot be read"):
        run("show", str(tmp_path / "nowhere"))


def test_a_log_goes_back_to_a_version(folder: str) -> None:
    assert run("truncate", folder, "--version", "3") == ("version 3, entries 1 to 4; 9 written rows were taken back\n")
    with open_store(f"memory?log={folder}") as store:
        assert (store.version(), store.row_count("t")) == (3, 3)
        with pytest.raises(StoreFailed, match="open already"):
            run("truncate", folder, "--version", "1")


def test_a_log_does_not_go_back_before_its_base(folder: str) -> None:
    with open_store(f"memory?log={folder}&log_bytes=1") as store:
        store.commit(Commit(6, {}, 5, {}))
        store._history._writing.join(60)  # type: ignore[attr-defined]
    with pytest.raises(StaleVersion, match="its base is newer"):
        run("truncate", folder, "--version", "5")
