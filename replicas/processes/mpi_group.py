"""A replica group whose members are processes started by MPI."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import UInt8
from elastable.embedding_store.errors import BadInput
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.processes.hosts import this_host
from elastable.replicas.processes.mpi_channel import CORES, MpiChannel
from elastable.replicas.processes.mpi_library import MPI
from elastable.replicas.processes.peer_monitor import PeerMonitor
from elastable.replicas.processes.rendezvous import MemberAddress, Rendezvous

__all__ = ["MpiGroup"]

_ADDRESS_BYTES = 1024
_BEGINNING = 0  # the channel on which members create a group

_next_channel = 1


class MpiGroup(ReplicaGroup):
    """A member of a group of processes; `replica_group` creates that of all processes.

    Members exchange MPI's nonblocking messages, within one host through shared memory. Nothing blocks inside MPI: each
    wait ends at the deadline, or when the connection to the awaited member ends.
    """

    def __init__(self, rank: int, ranks: Sequence[int], channel: MpiChannel, monitor: PeerMonitor) -> None:
        super().__init__(rank, ranks)
        self.monitor = monitor
        self._channel = channel

    @classmethod
    def of(cls, comm: MPI.Intracomm, ranks: Sequence[int], deadline_s: float) -> MpiGroup:
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
        hosts = _gather_texts(beginning, "hosts", rank, here)
        point = Rendezvous(one_host=len(set(hosts)) == 1)
        try:
            addresses = _gather_texts(beginning, "addresses", rank, point.address.to_bytes())
            connections = point.connect(rank, [MemberAddress.from_bytes(address) for address in addresses], deadline_s)
        finally:
            point.close()
        number = _channel_number(max(_numbers(beginning, "beginning", rank)), comm)
        beginning.close()
        monitor = PeerMonitor(rank, connections, deadline_s)
        crowded = hosts.count(here) > CORES
        return cls(rank, names, MpiChannel(comm, ranks, names, rank, number, deadline_s, monitor, crowded), monitor)

    def leave(self, why: str) -> None:
        self.monitor.leave(why)
        self._channel.close()

    def _gather(self, what: str, send: UInt8, receive: Sequence[UInt8]) -> None:
        self._channel.exchange(what, [send] * self.size, receive)

    def _exchange(self, what: str, send: Sequence[UInt8], receive: Sequence[UInt8]) -> None:
        self._channel.exchange(what, send, receive)

    def _part(self, what: str, members: Sequence[int]) -> ReplicaGroup:
        channel = self._channel
        number = _channel_number(max(_numbers(channel, what, self.rank)), channel.comm)
        addresses = [channel.addresses[member] for member in members]
        names = [self.ranks[member] for member in members]
        rank = members.index(self.rank)
        part = MpiChannel(
            channel.comm, addresses, names, rank, number, channel.deadline_s, self.monitor, channel.crowded
        )
        return MpiGroup(rank, names, part, self.monitor)


def _gather_texts(channel: MpiChannel, what: str, rank: int, mine: bytes) -> list[bytes]:
    """Everyone's short text, by rank."""
    size = len(channel.addresses)
    send = np.zeros(_ADDRESS_BYTES, np.uint8)
    send[: len(mine)] = np.frombuffer(mine, np.uint8)
    found = np.zeros((size, _ADDRESS_BYTES), np.uint8)
    channel.exchange(what, [send] * size, list(found))
    return [row.tobytes().rstrip(b"\0") for row in found]


def _numbers(channel: MpiChannel, what: str, rank: int) -> list[int]:
    """Everyone's first free channel number."""
    size = len(channel.addresses)
    found = np.zeros((size, 1), np.int64)
    channel.exchange(what, [np.array([_next_channel]).view(np.uint8)] * size, [row.view(np.uint8) for row in found])
    return [int(number) for number in found[:, 0]]


def _channel_number(number: int, comm: MPI.Intracomm) -> int:
    """Takes the channel number that all its members agreed on."""
    global _next_channel
    highest = int(comm.Get_attr(MPI.TAG_UB) or 32767) // 2 - 1  # the least that the standard guarantees
    if number > highest:
        raise BadInput(f"more than {highest} groups in one process; keep groups instead of creating them again")
    _next_channel = number + 1
    return number
