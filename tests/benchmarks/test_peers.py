"""Peers race in separate processes; a missing or failing one is reported and never recorded."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks import harness
from benchmarks.harness import publish
from benchmarks.peers import contender, workloads
from benchmarks.peers.contender import Contender, ContenderFailed
from benchmarks.peers.environments import OURS, PEERS, Environment
from benchmarks.peers.races import PEER_ABSENT, Pairing, Race, Runner, redis_races, run, table_races
from tests.waiting import until

SIDE = "tests.benchmarks.sides"


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Contender]:
    with Contender(Path(sys.executable), SIDE, tmp_path / "side.log", {"COUNTER": "5"}) as started:
        yield started


def until_stopped(started: Contender) -> None:
    stat = Path(f"/proc/{started.process_id}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def test_a_side_prepares_and_runs_rounds(side: Contender, tmp_path: Path) -> None:
    assert side.prepare("counts", {"amount": 3.0}) == "counter 5"
    assert side.round(0.01) > 0
    assert side.round(0.0) > 0
    assert "a library that greets" in (tmp_path / "side.log").read_text()


def test_who_has_no_turn_is_stopped(side: Contender) -> None:
    side.prepare("counts", {"amount": 1.0})
    until_stopped(side)
    side.round(0.0)
    until_stopped(side)


def test_a_side_that_refuses_says_why_and_can_be_asked_again(side: Contender) -> None:
    with pytest.raises(ContenderFailed, match="ValueError: no table here"):
        side.prepare("refuses", {"what": "table"})
    with pytest.raises(ContenderFailed, match="before anything was prepared"):
        side.round(0.0)
    side.prepare("counts", {"amount": 1.0})


def test_a_side_that_dies_is_reported_with_its_last_output(side: Contender) -> None:
    with pytest.raises(ContenderFailed, match=r"exit code 7(.|\n)*a library that greets"):
        side.prepare("dies", {})
    with pytest.raises(ContenderFailed, match="exit code 7"):
        side.round(0.0)
    side.close()
    side.close()


def test_a_side_that_hangs_is_not_waited_for(side: Contender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contender, "_PREPARE_S", 0.5)
    with pytest.raises(ContenderFailed, match=r"not answered within 0\.5 s"):
        side.prepare("hangs", {})


def test_a_stopped_side_does_not_outlive_a_harness_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from benchmarks.peers.contender import Contender; "
        f"side = Contender(Path(sys.executable), {SIDE!r}, Path({str(tmp_path / 'log')!r})); "
        "side.prepare('counts', {'amount': 1.0}); print(side.process_id, flush=True); time.sleep(600)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root) as harness:
        assert harness.stdout is not None
        side_id = int(harness.stdout.readline())
        harness.kill()
    status = Path(f"/proc/{side_id}/stat")
    until(lambda: not status.exists() or "Z" in status.read_text().rpartition(")")[2])


def race_with(theirs: Runner) -> Race:
    ours = Runner("ours", OURS, SIDE, "counts")
    pairings = (Pairing("counting, against theirs", "ours", theirs.name, 0.0),)
    return Race("calls/s", (ours, theirs), pairings, {"amount": 1.0, "what": "counter"})


def test_a_race(tmp_path: Path) -> None:
    (row,) = run(race_with(Runner("theirs", OURS, SIDE, "counts")), tmp_path, rounds=2, seconds=0.0)
    assert (row.name, row.unit, row.floor, row.verdict) == ("counting, against theirs", "calls/s", 0.0, "ok")
    assert row.value is not None
    assert row.reference is not None


def test_an_absent_peer_has_a_row_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    absent = Environment("fbgemm", home=tmp_path)
    (row,) = run(race_with(Runner("theirs", absent, SIDE, "counts")), tmp_path, rounds=2, seconds=0.0)
    assert (row.reference, row.ratio, row.note, row.verdict) == (None, None, PEER_ABSENT, PEER_ABSENT)
    assert row.value is not None
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    publish("x", "Title", [row])
    (written,) = json.loads((tmp_path / "x.json").read_text())
    assert (written["reference"], written["ratio"], written["note"]) == (None, None, PEER_ABSENT)
    assert PEER_ABSENT in capsys.readouterr().out  # type: ignore[attr-defined]


def test_a_peer_that_fails_has_a_row_that_says_so(tmp_path: Path, capsys: object) -> None:
    (row,) = run(race_with(Runner("theirs", OURS, SIDE, "refuses")), tmp_path, rounds=1, seconds=0.0)
    assert (row.reference, row.ratio, row.verdict) == (None, None, "failed")
    assert "no counter here" in capsys.readouterr().out  # type: ignore[attr-defined]


def test_a_peer_is_present_once_all_of_its_pins_are_installed(tmp_path: Path) -> None:
    peer = Environment("fbgemm", home=tmp_path)
    assert not peer.present
    peer.python.parent.mkdir(parents=True)
    peer.python.touch()
    assert not peer.present
    stamp = tmp_path / "fbgemm" / "installed.txt"
    stamp.write_text("another==1.0")
    assert not peer.present
    stamp.write_text(peer.pins.read_text())
    assert peer.present


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_everything_that_a_peer_needs_is_pinned(peer: Environment) -> None:
    lines = [line for line in peer.pins.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.]*", line) for line in lines)
    assert not any("elastable" in line for line in lines)


def test_every_pairing_has_its_runners() -> None:
    for race in [*table_races(), *redis_races("127.0.0.1:1")]:
        names = {runner.name for runner in race.runners}
        assert {name for pairing in race.pairings for name in (pairing.ours, pairing.theirs)} == names
        for runner in race.runners:
            module = runner.side.replace(".", "/") + ".py"
            assert (Path(__file__).parents[2] / module).exists()


def test_batches_are_the_same_in_every_process_and_lie_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workloads._BATCHES >= 24
    monkeypatch.setattr(workloads, "_BATCHES", 2)
    monkeypatch.setattr(workloads, "ROWS", 200_000)
    for make in (workloads.uniform, workloads.unique, workloads.zipf):
        first, second = make(), make()
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
        assert all(ids.min() >= 0 and ids.max() < workloads.ROWS and len(ids) == workloads.BATCH for ids in first)
    assert all(len(np.unique(ids)) == len(ids) for ids in workloads.unique())
    assert workloads.bags()[0].shape == (workloads.BATCH // workloads.BAG, workloads.BAG)
    present, batches = workloads.dynamic_ids()
    assert len(np.unique(present)) == workloads.ROWS
    assert np.isin(batches[0], present).all()


def test_zipf_ids_repeat_as_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "_BATCHES", 1)
    counts = np.sort(np.unique(workloads.zipf()[0], return_counts=True)[1])[::-1]
    share = 1 / np.sum(np.arange(1, workloads.ROWS + 1, dtype=np.float64) ** -1.05)
    assert abs(counts[0] / workloads.BATCH - share) < 0.01
    assert 0.3 < len(counts) / workloads.BATCH < 0.7
