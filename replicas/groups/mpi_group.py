"""A replica group whose members are processes started by MPI."""

import os
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NoReturn

import mpi4py
import numpy as np

from elastable.embedding_store.contract.arrays import UInt8
from elastable.embedding_store.errors import BadInput, DeadlineExceeded, ElastableError, Unavailable
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.peer_monitor import MemberAddress, PeerMonitor, Rendezvous, this_host

IMPORTED_BEFORE = "mpi4py.MPI" in sys.modules
"""Whether the program imported it first: then mpi4py ends MPI at exit, as the program's `mpi4py.rc` says."""

if not IMPORTED_BEFORE:  # it neither starts MPI at import, nor waits at exit for members that have gone
    mpi4py.rc.initialize = mpi4py.rc.finalize = False

from mpi4py import MPI as MPI  # noqa: E402 - reads mpi4py.rc

_ADDRESS_BYTES = 1024
_BEGINNING = 0  # the channel on which members create a group

_next_channel = 1


class MpiGroup(ReplicaGroup):
    """A member of a group of processes; `replica_group` creates that of all processes.

    Members exchange MPI's nonblocking messages, within one host through shared memory. Nothing blocks inside MPI: each
    wait ends at the deadline, or when the connection to the awaited member ends.
    """

    def __init__(self, rank: int, ranks: Sequence[int], channel: "MpiChannel", monitor: PeerMonitor) -> None:
        super().__init__(rank, ranks)
        self.monitor = monitor
        self._channel = channel

    @classmethod
    def of(cls, comm: MPI.Intracomm, ranks: Sequence[int], deadline_s: float) -> "MpiGroup":
        """The group of some MPI processes, each of which calls it.

        Args:
            comm: A communicator that nothing else uses.
            ranks: Ranks in `comm`, this process' among them.
            deadline_s: Seconds that members wait for each other without progress.

        Raises:
            DeadlineExceeded: a process has not called it.
            Unavailable: a process cannot be reached.
            BadInput: this process is not among them, or the deadline is not above 0.
        """
        if comm.rank not in ranks or not deadline_s > 0:
            raise BadInput(
                f"a group of ranks {list(ranks)} with a deadline of {deadline_s:g} s cannot be made by rank "
                f"{comm.rank}: it needs to be one of them, and a deadline above 0"
            )
        rank = list(ranks).index(comm.rank)
        names = range(len(ranks))
        beginning = MpiChannel(comm, ranks, names, rank, _BEGINNING, deadline_s, None)
        here = this_host().encode()
        hosts = _gather_texts(beginning, "hosts", here)
        point = Rendezvous(one_host=len(set(hosts)) == 1)
        try:
            addresses = _gather_texts(beginning, "addresses", point.address.to_bytes())
            connections = point.connect(rank, [MemberAddress.from_bytes(address) for address in addresses], deadline_s)
        finally:
            point.close()
        number = _channel_number(beginning, "beginning")
        beginning.close()
        monitor = PeerMonitor(rank, connections, deadline_s)
        crowded = hosts.count(here) > CORES
        return cls(rank, names, MpiChannel(comm, ranks, names, rank, number, deadline_s, monitor, crowded), monitor)

    def leave(self, why: str) -> None:
        self.monitor.leave(why)
        self._channel.close()

    def _exchange(self, what: str, send: Sequence[UInt8], receive: Sequence[UInt8]) -> None:
        self._channel.exchange(what, send, receive)

    def _part(self, what: str, members: Sequence[int]) -> ReplicaGroup:
        channel = self._channel
        number = _channel_number(channel, what)
        addresses = [channel.addresses[member] for member in members]
        names = [self.ranks[member] for member in members]
        rank = members.index(self.rank)
        part = MpiChannel(
            channel.comm, addresses, names, rank, number, channel.deadline_s, self.monitor, channel.crowded
        )
        return MpiGroup(rank, names, part, self.monitor)


def _gathered(channel: "MpiChannel", what: str, mine: UInt8) -> UInt8:
    """`[members, bytes]`: everyone's bytes, by rank."""
    size = len(channel.addresses)
    found = np.zeros((size, len(mine)), np.uint8)
    channel.exchange(what, [mine] * size, list(found))
    return found


def _gather_texts(channel: "MpiChannel", what: str, mine: bytes) -> list[bytes]:
    """Everyone's short text, by rank."""
    found = _gathered(channel, what, np.frombuffer(mine.ljust(_ADDRESS_BYTES, b"\0"), np.uint8))
    return [row.tobytes().rstrip(b"\0") for row in found]


def _channel_number(channel: "MpiChannel", what: str) -> int:
    """Takes a channel number that is free in all members; every member calls it."""
    global _next_channel
    number = int(_gathered(channel, what, np.array([_next_channel]).view(np.uint8)).view(np.int64).max())
    highest = int(channel.comm.Get_attr(MPI.TAG_UB) or 32767) // 2 - 1  # the least that the standard guarantees
    if number > highest:
        raise BadInput(f"more than {highest} groups in one process; keep groups instead of creating them again")
    _next_channel = number + 1
    return number


_WHAT_BYTES = 248
_HEADER_BYTES = _WHAT_BYTES + 8
_INLINE_BYTES = 3840  # what fits a message that MPI sends eagerly, without a handshake
_CHUNK_BYTES = 64 << 20  # keeps counts small; every chunk received shows that the sender is alive
_TESTS, _YIELDS = 100, 300
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
"""CPU cores of this process."""

_YIELD_S, _YIELD_MOVING_S = 0.001, 2.0
_SLEEP_S = (20e-6, 1e-3)
_ASK_S = 1.0
_HEARD_S = 5.0  # for the connection of a dead process to end

_abandoned: "list[tuple[MpiChannel, Sequence[MPI.Request]]]" = []
"""Requests and buffers of failed exchanges: a late member may still write into them."""


class MpiChannel:
    """The messages of one group, kept apart from those of other groups by their tags.

    Every exchange starts with one small message between every two members: it names the collective, so that mismatches
    are reported, carries small payloads, and shows that all members have called. Larger payloads follow.

    Args:
        comm: An MPI communicator that nothing else uses.
        addresses: Ranks in `comm`, by rank in the group.
        names: Ranks in the outermost group, by rank in the group; used in errors.
        number: Unique among channels that share two members.
        deadline_s: Seconds that members wait for each other without progress.
        monitor: Detects members that have left; None: nothing does yet.
        crowded: Whether this host has more members than cores.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        addresses: Sequence[int],
        names: Sequence[int],
        rank: int,
        number: int,
        deadline_s: float,
        monitor: PeerMonitor | None,
        crowded: bool = True,
    ) -> None:
        self.comm = comm
        self.addresses = tuple(addresses)
        self.number = number
        self.deadline_s = deadline_s
        self.monitor = monitor
        self.crowded = crowded
        self.failure: ElastableError | None = None
        self._names = tuple(names)
        self._rank = rank
        self._round = 0
        size = len(addresses)
        # Starting with the next one, so that not all members address the same one first.
        self._peers = [(rank + step) % size for step in range(1, size)]
        message = (size, _HEADER_BYTES + _INLINE_BYTES)
        self._sent, self._heard = np.zeros(message, np.uint8), np.zeros(message, np.uint8)
        self._sent_views = [row.data for row in self._sent]
        self._heard_views = [row.data for row in self._heard]
        self._openings = [comm.Recv_init(self._heard[peer], addresses[peer], 2 * number) for peer in self._peers]
        self._openings += [comm.Send_init(self._sent[peer], addresses[peer], 2 * number) for peer in self._peers]

    def exchange(self, what: str, send: Sequence[UInt8], receive: Sequence[UInt8]) -> None:
        """Copies `send[j]` of member i to `receive[i]` of member j; see `ReplicaGroup._exchange`."""
        if self.failure is not None:
            raise type(self.failure)(*self.failure.args)
        try:
            self._open(what, send)
            receive[self._rank][:] = send[self._rank]
            self._wait(what, self._openings, self._peers * 2, len(self._peers), _YIELD_S)
            self._agree(what, receive)
            self._move(what, send, receive)
        except BadInput:
            raise
        except MPI.Exception as error:
            self._name_who_broke(what, error)
        except BaseException as error:
            if self.failure is None:
                self.failure = Unavailable(f"{what}: this member left it unfinished, by {type(error).__name__}")
            raise
        self._round += 1
        if self.monitor is not None:
            self.monitor.rounds[self.number] = self._round

    def close(self) -> None:
        """Frees MPI's requests, unless an exchange has failed."""
        if self.failure is None and not MPI.Is_finalized():
            for request in self._openings:
                request.Free()
            self.failure = Unavailable("this member has closed the group")

    # -- one exchange

    def _open(self, what: str, send: Sequence[UInt8]) -> None:
        header = _header(what)
        for peer in self._peers:
            payload = send[peer]
            view = self._sent_views[peer]
            view[:_WHAT_BYTES] = header
            struct.pack_into("<q", view, _WHAT_BYTES, payload.nbytes)
            if payload.nbytes <= _INLINE_BYTES:
                view[_HEADER_BYTES : _HEADER_BYTES + payload.nbytes] = payload.data
        if self._openings:
            MPI.Prequest.Startall(self._openings)

    def _agree(self, what: str, receive: Sequence[UInt8]) -> None:
        """Raises BadInput, the same on every member, unless all call the same collective with matching sizes."""
        mine = _header(what)
        if all(bytes(self._heard_views[peer][:_WHAT_BYTES]) == mine for peer in self._peers):
            for peer in self._peers:
                (length,) = struct.unpack_from("<q", self._heard_views[peer], _WHAT_BYTES)
                if length != receive[peer].nbytes:
                    raise BadInput(
                        f"{what}: rank {self._names[peer]} sends {length} bytes to rank {self._names[self._rank]}, "
                        f"which expects {receive[peer].nbytes}"
                    )
                if length <= _INLINE_BYTES:
                    receive[peer][:] = self._heard[peer, _HEADER_BYTES : _HEADER_BYTES + length]
            return
        called = [bytes(view[:_WHAT_BYTES]) for view in self._heard_views]
        called[self._rank] = mine
        other = next(place for place, one in enumerate(called) if one != called[0])
        calls = [called[place].rstrip(b"\0").decode(errors="replace") for place in (0, other)]
        raise BadInput(f"rank {self._names[0]} calls {calls[0]}, and rank {self._names[other]} {calls[1]}")

    def _move(self, what: str, send: Sequence[UInt8], receive: Sequence[UInt8]) -> None:
        requests: list[MPI.Request] = []
        peers: list[int] = []
        tag = 2 * self.number + 1
        receives = 0
        for call, blocks in ((self.comm.Irecv, receive), (self.comm.Isend, send)):
            receives = len(requests)  # finally: the number of receive requests
            for peer in self._peers:
                if blocks[peer].nbytes <= _INLINE_BYTES:
                    continue
                for first in range(0, blocks[peer].nbytes, _CHUNK_BYTES):
                    requests.append(call(blocks[peer][first : first + _CHUNK_BYTES], self.addresses[peer], tag))
                    peers.append(peer)
        # All members are here. MPI makes progress only when tested, so sleeping would slow it down.
        self._wait(what, requests, peers, receives, _YIELD_MOVING_S)

    # -- waiting

    def _wait(
        self, what: str, requests: Sequence[MPI.Request], peers: list[int], receives: int, awake_s: float
    ) -> None:
        """Waits until all requests are done; `peers` has the other member of each.

        The first `receives` requests receive. It sleeps between tests after `awake_s` without progress.
        """
        if not requests:
            return
        pending = dict(enumerate(peers))
        try:
            # Yielding the core costs a time slice; it pays off if another member waits for the core.
            for test in range(_TESTS + _YIELDS):
                if MPI.Request.Testall(requests):
                    return
                if self.crowded or test > _TESTS:
                    os.sched_yield()
            self._wait_long(what, requests, pending, awake_s)
        except BaseException:
            _abandoned.append((self, requests))
            for place in pending:
                if place < receives:
                    with suppress(MPI.Exception):  # it may have completed or failed
                        requests[place].Cancel()
            raise

    def _wait_long(self, what: str, requests: Sequence[MPI.Request], pending: dict[int, int], awake_s: float) -> None:
        """`_wait` with deadline and monitor; removes completed requests from `pending`."""
        progress = time.monotonic()
        asked = False
        ask_s = min(_ASK_S, self.deadline_s / 2)
        try:
            while True:
                now = time.monotonic()
                done = MPI.Request.Testsome(requests)
                if done:
                    for place in done:
                        del pending[place]
                    if not pending:
                        return
                    progress, asked = now, False
                missing = sorted(set(pending.values()))
                if self.monitor is not None:
                    self.monitor.at = what, tuple(self._names[place] for place in missing)
                self._require_there(what, missing)
                if not asked and now - progress > self.deadline_s - ask_s:
                    asked = True
                    if self.monitor is not None:
                        self.monitor.ask_all()
                if now - progress > self.deadline_s:
                    self._give_up(what, missing)
                _rest(now - progress, awake_s)
        finally:
            if self.monitor is not None:
                self.monitor.at = None

    def _name_who_broke(self, what: str, error: MPI.Exception) -> NoReturn:
        """MPI has noticed that a process has died, but not which; the monitor is about to learn it."""
        end = time.monotonic() + min(_HEARD_S, self.deadline_s)
        while self.monitor is not None and time.monotonic() < end:
            self._require_there(what, self._peers)
            time.sleep(_SLEEP_S[1])
        self.failure = Unavailable(f"{what}: MPI gave up on this exchange: {error}")
        raise Unavailable(*self.failure.args) from error

    def _require_there(self, what: str, missing: Sequence[int]) -> None:
        if self.monitor is None or not self.monitor.gone:
            return
        lost = self.monitor.first_lost([self._names[place] for place in missing], self.number, self._round + 1)
        if lost is not None:
            self.failure = Unavailable(f"rank {lost[0]} has left the group: {lost[1]}")
            raise Unavailable(*self.failure.args)

    def _give_up(self, what: str, missing: Sequence[int]) -> None:
        names = [self._names[place] for place in missing]
        story = self.monitor.story(names) if self.monitor is not None else ""
        self.failure = DeadlineExceeded(
            f"{what}: rank {', '.join(map(str, names))} has not come within {self.deadline_s:g} s{story}"
        )
        raise DeadlineExceeded(*self.failure.args)


def _rest(waited_s: float, awake_s: float) -> None:
    """Yields the core; after `awake_s`, sleeps for about 5 % of the time waited so far."""
    if waited_s < awake_s:
        os.sched_yield()
    else:
        time.sleep(min(max(_SLEEP_S[0], waited_s / 20), _SLEEP_S[1]))


@lru_cache(1024)
def _header(what: str) -> bytes:
    return what.encode()[:_WHAT_BYTES].ljust(_WHAT_BYTES, b"\0")
