"""The socket at which processes of one host share memory: what visitors say there, and what owners answer."""

import json
import os
import socket
import threading
from contextlib import suppress

import numpy as np

from elastable.embedding_store.support.array_body import BodyPlan
from elastable.embedding_store.wire.shared.attachment import CHANNEL, LAYOUT, NOTIFICATIONS, connected, receive_packet
from elastable.embedding_store.wire.shared.shared_channel import SharedChannel, SharedMessage
from elastable.embedding_store.wire.shared.shared_source import attached_tables
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore, channels_of
from tests.fuzz.mutator import Mutator
from tests.fuzz.store_calls import SPECS
from tests.fuzz.target import Finding, Target


class Attachments(Target):
    """Visitors of the attachments, and messages that lie in channels."""

    name = "attachments"
    share = 40

    def open(self) -> None:
        self.store = self.held.enter_context(SharedMemoryStore(1))
        for spec in SPECS.values():
            self.store.create_table(spec)
        self.store.delete("any", np.arange(3, dtype=np.int64))
        self.channel = SharedChannel(self.store.attachments.name, self.store.attachments.token)
        self.held.callback(self.channel.close)

    def case(self, m: Mutator) -> str | None:
        if m.chance(0.3):
            return self._letter(m)
        said = self.store.attachments.token + m.choice((NOTIFICATIONS, LAYOUT, CHANNEL))
        if m.chance(0.6):
            said = m.mutated(said)
        with connected(self.store.attachments.name) as visitor, suppress(OSError):
            handed = [os.memfd_create("hostile")] if m.chance(0.4) else []
            try:
                if m.chance(0.9):
                    socket.send_fds(visitor, [said], handed * (1 + m.small(1)))
                else:
                    visitor.shutdown(socket.SHUT_WR)
                receive_packet(visitor)
            finally:
                for one in handed:
                    os.close(one)
        return None

    def _letter(self, m: Mutator) -> str | None:
        """An channel that holds something else than the message says."""
        body = np.frombuffer(m.bytes(64), np.uint8)
        message = self.channel.put([body])
        plan = BodyPlan("GradientFrame")
        for _ in range(m.small(3)):
            plan.add("values", (m.integer(-2, 2**40), m.small(9)), np.dtype(np.float32))
        boxes = channels_of(self.store)
        assert boxes is not None
        asked = SharedMessage(
            message.channel if m.chance(0.7) else m.integer(0, 2**63 - 1),
            message.stamp if m.chance(0.7) else m.integer(0, 2**63 - 1),
        )
        boxes.read(asked, plan)
        return None

    def check(self) -> None:
        """A good process attaches, and finds the rows."""
        with connected(self.store.attachments.name) as visitor:
            _, tables = attached_tables(visitor, self.store.attachments.token)
        if set(tables) != set(SPECS) - {"follows"}:  # whose rows are what they are at the current step
            raise Finding(f"who attaches finds {sorted(tables)}")


class Owners(Target):
    name = "owners"
    share = 30

    def open(self) -> None:
        self.store = self.held.enter_context(SharedMemoryStore(1))
        for spec in SPECS.values():
            self.store.create_table(spec)
        self.packets: list[tuple[dict[str, object], list[int]]] = []
        with connected(self.store.attachments.name) as visitor:
            visitor.send(self.store.attachments.token + LAYOUT)
            with suppress(ConnectionError):  # until it hangs up
                while True:
                    self.packets.append(receive_packet(visitor))
        for _, descriptors in self.packets:
            for one in descriptors:
                self.held.callback(os.close, one)

    def case(self, m: Mutator) -> str | None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            ours.settimeout(10.0)
            theirs.settimeout(10.0)
            liar = threading.Thread(target=self._lie, args=(m, theirs), daemon=True)
            liar.start()
            try:
                _, tables = attached_tables(ours, b"t" * 16)
                for table in tables.values():
                    now = table.now(lambda: True)
                    out = np.empty((3, table.spec.dim), np.float32)
                    now.read(np.array([0, 1, 2], np.int64), out, False)
            except (OSError, MemoryError):
                return "refused"  # as a connection that broke, which the store is asked instead of
            finally:
                with suppress(OSError):
                    ours.shutdown(socket.SHUT_RDWR)
                liar.join(60)
        return None

    def _lie(self, m: Mutator, to: socket.socket) -> None:
        with suppress(OSError):
            to.recv(64)
            for packet, descriptors in self.packets:
                text = json.dumps(m.mutated_json(packet) if m.chance(0.2) else packet).encode()
                if m.chance(0.05):
                    text = m.mutated(text)
                handed = descriptors if m.chance(0.9) else descriptors[: m.small(1)]
                socket.send_fds(to, [text or b" "], handed)
            to.shutdown(socket.SHUT_WR)

    def check(self) -> None:
        with connected(self.store.attachments.name) as visitor:
            attached_tables(visitor, self.store.attachments.token)
