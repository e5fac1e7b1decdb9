"""`elastable status`: how far a job is, once or again and again."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from elastable.commands.command_line import AS_JSON, DEADLINE, takes
from elastable.embedding_store.contract.row_data import FlushStatus
from elastable.embedding_store.contract.snapshot import PinStatistics
from elastable.embedding_store.errors import Unavailable, Unsupported
from elastable.embedding_store.option import Option, required, setting
from elastable.embedding_store.shards.server_contract import ServerStatus, ShardStatus
from elastable.embedding_store.wire.pushes.remote_store import RemoteStore
from elastable.master.api import JobStatus, Refusal, WorkerIdentity
from elastable.master.rpc.client import MasterClient
from elastable.process.stopping import OutputConsole

_ENDED = ("finished", "failed")


@dataclass(frozen=True, slots=True)
class _StatusOptions:
    master: str = required(Option("Address of the master.", metavar="HOST:PORT"))
    as_json: bool = setting(False, AS_JSON)
    watch: bool = setting(False, Option("Show it until the job has ended; with --json a line each time."))
    every_s: float = setting(2.0, Option("With --watch: how often.", flags=("--every",), above=0, metavar="SECONDS"))
    deadline_s: float = setting(5.0, DEADLINE)


_Reported = tuple[JobStatus, Sequence[PinStatistics]]


@takes(_StatusOptions)
def status(options: _StatusOptions) -> None:
    """Show how far a job is, how fast, and who works on it."""
    with RemoteStore(options.master, deadline_s=options.deadline_s) as store:
        client = MasterClient(options.master, deadline_s=options.deadline_s)
        console = OutputConsole()
        if not options.watch:
            reported = _status(client, store), store.pins()
            if options.as_json:
                typer.echo(json.dumps(_as_json(*reported), indent=2))
            else:
                console.print(_shown(*reported))
            return
        is_live = console.is_terminal and not options.as_json
        with Live(console=console, auto_refresh=False) if is_live else nullcontext() as live:
            for each in _reports(client, store, options.every_s):
                if options.as_json:
                    typer.echo(json.dumps(_as_json(*each)))
                elif live is None:
                    console.print(_shown(*each))
                else:
                    live.update(_shown(*each), refresh=True)


def _status(client: MasterClient, store: RemoteStore) -> JobStatus:
    """Of the job; of a parameter server, which has none, its version."""
    try:
        return client.status()
    except Unsupported:
        return JobStatus("", "serving", "", store.version(), 0, 0, 0, 0, {}, (), "")


def _reports(client: MasterClient, store: RemoteStore, every_s: float) -> Iterator[_Reported]:
    """The status again and again, until the job has ended or its master is gone.

    Raises:
        Unavailable: the master cannot be reached, and did not say before that the job was about to end.
    """
    last: JobStatus | None = None
    while True:
        try:
            reported = _status(client, store), store.pins()
        except Unavailable:
            if last is not None and (last.state == "stopping" or 0 < last.versions_total <= last.version):
                return
            raise
        yield reported
        last = reported[0]
        if last.state in _ENDED:
            return
        time.sleep(every_s)


def _shown(reported: JobStatus, pins: Sequence[PinStatistics]) -> RenderableType:
    found: list[RenderableType] = [_progress_table(reported), _workers_table(reported)]
    if reported.servers:
        found.append(_servers_table(reported.servers))
    if reported.flush is not None:
        found.append(_flush_table(reported.flush))
    if pins:
        pinned = Table("version", "seconds left", "rows kept", "bytes", title="pinned versions")
        for pin in pins:
            pinned.add_row(f"{pin.version:,}", f"{pin.lease_left_s:.0f}", f"{pin.rows:,}", f"{pin.bytes:,}")
        found.append(pinned)
    if reported.refusals:
        found.append(_refusals_table(reported.refusals))
    return Group(*found)


def _workers_table(reported: JobStatus) -> Table:
    """Those that are there, and then those that left while there was work."""
    title = f"{len(reported.workers)} workers"
    workers = Table("host", "pid", "state", "leases", "micro-batches", "examples/s", "last result", title=title)
    for worker in reported.workers:
        who, state, heard = worker.identity, "working" if worker.leases else "idle", f"{worker.silent_s:.0f} s ago"
        rate = f"{worker.records_per_s:,.0f}"
        workers.add_row(
            escape(who.host), str(who.pid), state, str(worker.leases), f"{worker.micro_batches:,}", rate, heard
        )
    for gone in reported.gone:
        who, left = gone.identity, f"left {gone.seconds_ago:.0f} s ago"
        workers.add_row(
            escape(who.host), str(who.pid), "gone", str(gone.leases), f"{gone.micro_batches:,}", "", left, style="dim"
        )
    return workers


def _servers_table(servers: Sequence[ServerStatus]) -> Table:
    """Store servers: what each holds, and for how long the job has been waiting for it."""
    columns = "server", "version", "rows", "bytes", "in memory", "versions behind", "waited for"
    table = Table(*columns, title=f"{len(servers)} store servers")
    for server in servers:
        shard = server.shard or ShardStatus()
        hit = "" if shard.hit_rate is None else f"{shard.hit_rate:.1%}"
        waited = f"{server.waited_s:.1f} s" if server.waited_s else ""
        held = f"{shard.version:,}", f"{shard.rows:,}", f"{shard.bytes:,}", hit, f"{shard.flush_lag:,}"
        table.add_row(escape(server.address), *held, waited if not server.failure else escape(server.failure))
    return table


def _refusals_table(refusals: Sequence[Refusal]) -> Table:
    refused = Table("host", "pid", "how many", "why", title="failed workers")
    for refusal in refusals:
        why = f"{refusal.error}: {refusal.message}"
        refused.add_row(escape(refusal.worker.host), str(refusal.worker.pid), str(refusal.count), escape(why))
    return refused


def _progress_table(reported: JobStatus) -> Table:
    """How far a job is; of a parameter server without a model, which has no end, at which version it is."""
    endless = not reported.mode
    title = "parameter server" if endless else f"job {escape(reported.job)}"
    table = Table(title=title, show_header=False, title_justify="left", min_width=20)
    if endless:
        table.add_row("version", f"{reported.version:,}")
        return table
    table.add_row("state", escape(reported.state + (f" ({reported.stopped})" if reported.stopped else "")))
    table.add_row("mode", escape(reported.mode))
    table.add_row("store", escape(reported.store))
    of_versions = f" of {reported.versions_total:,}" if reported.versions_total else ""
    table.add_row("version", f"{reported.version:,}{of_versions}")
    of_epochs = f" of {reported.epochs}" if reported.epochs else ""
    table.add_row("epoch", f"{min(reported.epoch + 1, reported.epochs or reported.epoch + 1)}{of_epochs}")
    total = f" of {reported.records_total:,}" if reported.records_total else ""
    table.add_row("records trained", f"{reported.records_trained:,}{total}")
    if (stream := reported.stream) is not None:
        bad = f", {stream.bad_events:,} could not be read" if stream.bad_events else ""
        away = f"; away: {escape(stream.away)}" if stream.away else ""
        table.add_row("behind the stream", f"{stream.lag_events:,} events, {stream.lag_s:.1f} s{bad}{away}")
    table.add_row("examples/s", f"{reported.records_per_s:,.0f}")
    table.add_row("time left", _duration(reported.seconds_left))
    for name, value in reported.metrics.items():
        table.add_row(escape(name), f"{value:.4f}")
    return table


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _flush_table(flush: FlushStatus) -> Table:
    """How far the tier of the store is behind."""
    table = Table(title="rows written behind", show_header=False, title_justify="left")
    table.add_row("written up to version", f"{flush.flushed_version:,} of {flush.version:,}")
    table.add_row("changed rows", f"{flush.changed_rows:,}")
    table.add_row("log", f"{flush.log_bytes:,} bytes")
    table.add_row("commits that waited", f"{flush.waits:,}, for {flush.waited_s:.1f} s")
    if flush.failure is not None:
        table.add_row("failure", escape(flush.failure))
    return table


def _as_json(reported: JobStatus, pins: Sequence[PinStatistics]) -> dict[str, object]:
    apart = ("workers", "refusals", "gone", "servers")
    plain = {name: getattr(reported, name) for name in reported.__slots__ if name not in apart}
    plain["stream"] = None if reported.stream is None else asdict(reported.stream)
    plain["metrics"], plain["seconds_left"] = dict(reported.metrics), reported.seconds_left
    plain["flush"] = None if reported.flush is None else asdict(reported.flush)
    speed = ("leases", "micro_batches", "records_per_s", "silent_s")
    plain["workers"] = [_of_worker(each.identity, each, speed) for each in reported.workers]
    plain["gone"] = [_of_worker(each.identity, each, ("leases", "seconds_ago")) for each in reported.gone]
    plain["refusals"] = [_of_worker(each.worker, each, ("error", "message", "count")) for each in reported.refusals]
    plain["servers"] = [asdict(server) for server in reported.servers]
    return {**plain, "pins": [asdict(pin) for pin in pins]}


def _of_worker(who: WorkerIdentity, reported: object, names: Sequence[str]) -> dict[str, object]:
    return {"host": who.host, "pid": who.pid, **{name: getattr(reported, name) for name in names}}
