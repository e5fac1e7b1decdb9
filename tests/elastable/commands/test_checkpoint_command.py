"""`elastable checkpoint`: what is saved, shown to people and to programs."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastable.command import app
from elastable.embedding_store.contract.spec import EvictionSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, CheckpointError, Unsupported
from elastable.embedding_store.open_store import open_store
from elastable.master.checkpoints.series import CheckpointSeries
from tests.master.checkpoints.jobs import DYNAMIC, FIXED, JOB, commit, created, dense_of, flip, progress_of, rows


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Two checkpoints: a full one, and an increment upon it."""
    with created(MemoryStore(), [FIXED, DYNAMIC]) as store:
        series = CheckpointSeries(tmp_path / "saved", store)
        for ids in (list(range(40)), [3, 77]):
            series.committed(commit(store, {"fixed": ids, "dynamic": ids}))
            version = store.version()
            series.begin(store, dense_of(version), JOB, progress_of(version))()
    return tmp_path / "saved"


def output_of(*arguments: object, code: int = 0) -> str:
    ended = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    assert ended.exit_code == code, ended.output
    return ended.stdout


def test_list_for_people_and_programs(home: Path) -> None:
    first, second = json.loads(output_of("list", home, "--json"))
    assert (first["version"], first["kind"], first["rows"], first["base"]) == (1, "full", 80, None)
    found = (second["version"], second["kind"], second["rows"], second["base"])
    assert found == (2, "increment", 82, "ckpt-0000000001")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", second["written"])
    size = sum(file.stat().st_size for file in (home / "ckpt-0000000001").glob("*.safetensors"))
    assert first["bytes"] == size
    shown = output_of("list", home)
    for word in ("ckpt-0000000001", "increment", "82", "KiB", "whole", first["written"]):
        assert word in shown


def test_list_names_what_is_damaged(home: Path) -> None:
    file = home / "ckpt-0000000001" / "dense.safetensors"
    flip(file, -1)
    assert [entry["whole"] for entry in json.loads(output_of("list", home, "--json"))] == [True, True]
    first, second = json.loads(output_of("list", home, "--verify", "--json"))
    assert not first["whole"]
    assert not second["whole"]  # it builds upon the first
    assert first["damage"] == f"{file}: its bytes are not the ones that were written"
    assert "damaged: " in output_of("list", home, "--verify")
    file.unlink()
    first, _ = json.loads(output_of("list", home, "--json"))
    assert first["damage"] == f"{file}: missing"


def test_show(home: Path) -> None:
    entry = json.loads(output_of("show", home, "--json"))
    assert (entry["version"], entry["records"], entry["job"]["job"]) == (2, 200, "small")
    assert entry["tables"]["dynamic"]["written"] == 2
    shown = output_of("show", home / "ckpt-0000000002")
    for word in ("increment", "builds upon", "ckpt-0000000001", "2 changed", "adagrad", "adam"):
        assert word in shown


def test_verify(home: Path) -> None:
    assert "6 files, whole" in output_of("verify", home)
    assert json.loads(output_of("verify", home, "--json"))["whole"]
    (home / "ckpt-0000000002" / "dense.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"it has 0 bytes.*an older checkpoint next to it is intact"):
        output_of("verify", home)


def test_restore_to_files_and_shards(home: Path, tmp_path: Path) -> None:
    where = f"file://{tmp_path / 'files'}"
    answer = json.loads(output_of("restore", home, "--store", where, "--tables", "dynamic", "--dtype", "bfloat16"))
    assert answer == {"store": where, "version": 2, "rows": {"dynamic": 41}}
    with open_store(where) as store:
        assert {name: spec.dtype for name, spec in store.specs().items()} == {"dynamic": "bfloat16"}
        assert (store.version(), len(rows(store))) == (2, 41)
    with pytest.raises(BadInput, match=r"holds 1 tables at version 2 \(dynamic\), maybe of a job that runs"):
        output_of("restore", home, "--store", where)
    output_of("restore", home / "ckpt-0000000001", "--store", where, "--overwrite")
    with open_store(where) as store:
        assert (store.version(), len(rows(store))) == (1, 80)
        before = rows(store)
    (home / "ckpt-0000000001" / "table-0000-00000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="it has 0 bytes"):
        output_of("restore", home, "--store", where, "--overwrite")
    with open_store(where) as store:
        assert rows(store) == before


def test_restore_to_redis_but_not_into_a_running_job(home: Path, redis_url: str) -> None:
    answer = json.loads(output_of("restore", home, "--store", redis_url))
    assert answer["rows"] == {"dynamic": 41, "fixed": 41}
    with pytest.raises(BadInput, match=r"holds 2 tables at version 2 \(dynamic, fixed\)"):
        output_of("restore", home, "--store", redis_url)
    with open_store(redis_url) as job:
        before = rows(job)
        commit(job, {"dynamic": [5]})
        with pytest.raises(BadInput, match=r"is in use: .*:[0-9]+ \(host:process\) is connected to write to it"):
            output_of("restore", home, "--store", redis_url, "--overwrite")
        assert job.version() == 3
        commit(job, {"dynamic": [5]})
    output_of("restore", home, "--store", redis_url, "--overwrite")
    with open_store(redis_url) as store:
        assert (store.version(), rows(store)) == (2, before)


def test_a_store_that_cannot_keep_a_table_is_left_as_it_was(tmp_path: Path, redis_url: str) -> None:
    few = TableSpec("few", 2, eviction=EvictionSpec(max_rows=5))
    with created(MemoryStore(), [few, DYNAMIC]) as store:
        commit(store, {"few": [1], "dynamic": [2]})
        series = CheckpointSeries(tmp_path, store)
        series.begin(store, {}, JOB, progress_of(1))()
    shards = f"token:{redis_url}?namespace=a,{redis_url}?namespace=b"
    with pytest.raises(Unsupported, match="table 'few': eviction by max_rows needs all rows in one place"):
        output_of("restore", tmp_path, "--store", shards)
    output_of("restore", tmp_path, "--store", shards, "--tables", "dynamic")
    with open_store(shards) as other:
        assert sorted(other.specs()) == ["dynamic"]


def test_restore_to_memory_is_refused(home: Path) -> None:
    with pytest.raises(BadInput, match="its rows would be lost when this command ends"):
        output_of("restore", home, "--store", "memory")
    with pytest.raises((BadInput, Unsupported), match="nothing"):
        output_of("restore", home, "--store", "nothing://here")


def test_diff(home: Path) -> None:
    one, two = home / "ckpt-0000000001", home / "ckpt-0000000002"
    assert json.loads(output_of("diff", one, one, "--json"))["same"]
    answer = json.loads(output_of("diff", one, two, "--json", code=1))
    dynamic = answer["tables"][0]
    assert (dynamic["only_second"], dynamic["weights"], dynamic["first_ids"]) == (1, 1, [3])
    assert dynamic["largest_weight"] > 0
    assert [entry["key"] for entry in answer["dense"]] == ["optimizer/00000", "variables/00000"]
    shown = output_of("diff", one, two, code=1)
    for word in ("dynamic", "1 rows", "optimizer/00000", "values"):
        assert word in shown
    assert "dense: the same" in output_of("diff", two, two)
