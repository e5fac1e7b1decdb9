"""Measures every installed peer, and reports the others as absent.

python -m benchmarks.peers [tables] [redis] [click]
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Row, publish
from benchmarks.peers.click import click_rows, redis_click_rows
from benchmarks.peers.races import redis_races, run, table_races
from benchmarks.processes import redis_server

_SUBJECTS = ("tables", "redis", "click")
_START_S = 20.0


def main(subjects: list[str]) -> None:
    """Measures, prints, and writes `results/peers_SUBJECT.json` of each subject."""
    unknown = [subject for subject in subjects if subject not in _SUBJECTS]
    if unknown:
        raise SystemExit(f"no races of {', '.join(unknown)}; there are {', '.join(_SUBJECTS)}")
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        home = Path(folder)
        for subject in subjects or _SUBJECTS:
            if subject == "tables":
                rows = [row for race in table_races() for row in run(race, home)]
                title = "Tables in memory, 2 M rows x 64, 65,536 ids, two threads each"
            elif subject == "click":
                with _node() as address:
                    rows = [*click_rows(home), *redis_click_rows(home, address)]
                title = "The click model from end to end"
            else:
                rows = _redis(home)
                title = "16,384 rows x 64 over 64 partitions of one Redis node"
            publish(f"peers_{subject}", title, rows)


def _redis(home: Path) -> list[Row]:
    with _node() as address:
        return [row for race in redis_races(address) for row in run(race, home)]


@contextmanager
def _node() -> Iterator[str]:
    """The address of a Cluster of one: recommenders-addons splits a table only in a Cluster."""
    with redis_server("--cluster-enabled", "yes", "--cluster-announce-ip", "127.0.0.1") as server:
        with server.client() as client:
            client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16_383)
            end = time.monotonic() + _START_S
            while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                if time.monotonic() > end:
                    raise RuntimeError(f"the Cluster node at {server.address} is not ready after {_START_S:g} s")
                time.sleep(0.05)
        yield server.address


if __name__ == "__main__":
    main(sys.argv[1:])
