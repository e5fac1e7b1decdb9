"""A hash slot of a Cluster that moves from its owner to another node, step by step."""

from tests.servers import Server


class Migration:
    """Of one slot; the steps are those of `redis-cli --cluster reshard`."""

    def __init__(self, servers: list[Server], slot: int) -> None:
        self.slot = slot
        self.clients = [server.client() for server in servers]
        self.names = [client.execute_command("CLUSTER MYID").decode() for client in self.clients]
        self.ports = [server.port for server in servers]
        ranges = self.clients[0].execute_command("CLUSTER SLOTS")
        (port,) = [int(node[1]) for first, last, node, *_ in _plain(ranges) if first <= slot <= last]
        self.source = self.ports.index(port)
        self.target = (self.source + 1) % len(servers)

    def begin(self) -> None:
        """From now on the source answers ASK for keys that it does not have."""
        self._set_slot(self.target, "IMPORTING", self.names[self.source])
        self._set_slot(self.source, "MIGRATING", self.names[self.target])

    def move(self, key: bytes) -> None:
        answer = self.clients[self.source].execute_command(
            "MIGRATE", "127.0.0.1", self.ports[self.target], key, 0, 5000
        )
        assert answer in (b"OK", b"NOKEY", "OK", "NOKEY", True)

    def keys_left(self) -> list[bytes]:
        """Keys of the slot that the source still has."""
        return list(self.clients[self.source].execute_command("CLUSTER GETKEYSINSLOT", self.slot, 100))

    def finish(self) -> None:
        """Moves the rest; the target owns the slot. Finishing twice is harmless."""
        for key in self.keys_left():
            self.move(key)
        for node in (self.target, self.source, 3 - self.target - self.source):
            self._set_slot(node, "NODE", self.names[self.target])

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def _set_slot(self, node: int, *words: str) -> None:
        self.clients[node].execute_command("CLUSTER SETSLOT", self.slot, *words)


def _plain(ranges: object) -> list[tuple]:
    """CLUSTER SLOTS as a list, whichever way this redis-py shapes it."""
    if isinstance(ranges, dict):
        return [(first, last, node["primary"]) for (first, last), node in ranges.items()]
    return list(ranges)  # type: ignore[call-overload]
