"""What metrics cost a running job: examples/s and processor time with `--http` while scraped, and without.

The job is that of `benchmarks/jobs/click.py`: a master and a worker in separate processes. Two of them run in
turns: one whose master and worker both serve metrics and are both scraped once a second, some fifteen times as often as
usual; and one without `--http`.

    python -m benchmarks.jobs.metrics
"""

import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks.click_job.contender import ready
from benchmarks.click_job.contenders import Job, click_job
from benchmarks.harness import Rounds, compare, interleaved, publish
from benchmarks.processes import processor_s
from tests.ports import free_port

_ROWS, _OPTIMIZER, _THREADS = 1_000_000, "Adagrad", 2
_ROUNDS, _SECONDS = 15, 3.0
_SCRAPE_EVERY_S = 1.0
_FLOOR = 0.99  # metrics cost at most 1 % of examples/s


def main() -> None:
    """Measures, prints and writes `results/metrics.json`."""
    with tempfile.TemporaryDirectory(prefix="metrics-") as home:
        speeds, costs = _measured(Path(home))
    rows = [
        compare("training while scraped, vs. without --http", "examples/s", speeds["shown"], speeds["plain"], _FLOOR),
        compare("processor time of an example, scraped", "us", costs["shown"], costs["plain"], _FLOOR),
    ]
    publish("metrics", "What metrics cost a running job: the click model, Adagrad, 1 M rows", rows)


def _measured(home: Path) -> tuple[Rounds, Rounds]:
    """Examples/s, and microseconds of processor time for each example."""
    ports = [free_port() for _ in range(2)]
    served = [("--http", f"127.0.0.1:{port}") for port in ports]
    costs: dict[str, list[float]] = {"shown": [], "plain": []}
    jobs = {
        "shown": click_job("shown", _ROWS, _OPTIMIZER, home, served[0], threads=_THREADS, of_workers=served[1]),
        "plain": click_job("plain", _ROWS, _OPTIMIZER, home, threads=_THREADS),
    }
    with ready(*jobs.values()):
        turns = {name: partial(_turn, job, costs[name], ports if name == "shown" else ()) for name, job in jobs.items()}
        return interleaved(turns, _ROUNDS), costs


def _turn(job: Job, costs: list[float], scraped: Sequence[int]) -> float:
    """Examples/s of one turn; adds what an example cost."""
    pids = [process.pid for process in job.processes]
    with job.running(), _scraping(scraped):
        first, used = job.version(), processor_s(pids)
        speed = job.measured(_SECONDS)
        examples, used = (job.version() - first) * job.examples, processor_s(pids) - used
    costs.append(used / examples * 1e6)
    return speed


@contextmanager
def _scraping(ports: Sequence[int]) -> Iterator[None]:
    over = threading.Event()
    failures: list[OSError] = []

    def scrape() -> None:
        while not over.is_set():
            for port in ports:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                        answer.read()
                except OSError as error:
                    failures.append(error)
            over.wait(_SCRAPE_EVERY_S)

    scraping = threading.Thread(target=scrape)
    scraping.start()
    try:
        yield
    finally:
        over.set()
        scraping.join()
    if failures:
        raise failures[0]


if __name__ == "__main__":
    main()
