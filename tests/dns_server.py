"""A DNS server on loopback that answers what a test says."""

import socket
import threading
from collections.abc import Sequence
from typing import Self

import dns.flags
import dns.message
import dns.rcode
import dns.rrset


class DnsServer:
    """Knows addresses (type A) of names; all others do not exist.

    Attributes:
        address: `host:port`, over UDP.
        answers: Name, with the dot at its end -> its addresses each time it is asked for; the last ones stay.
        asked: The names that it was asked for, in order.
    """

    def __init__(self) -> None:
        self.answers: dict[str, list[Sequence[str]]] = {}
        self.asked: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._socket.sendto(b"", self._socket.getsockname())
        self._thread.join(60)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            request, client = self._socket.recvfrom(512)
            if not request:
                return
            query = dns.message.from_wire(request)
            reply = dns.message.make_response(query)
            reply.flags |= dns.flags.AA
            (question,) = query.question
            name = question.name.to_text()
            self.asked.append(name)
            rest = self.answers.get(name)
            if rest is None:
                reply.set_rcode(dns.rcode.NXDOMAIN)
            else:
                now = rest.pop(0) if len(rest) > 1 else rest[0]
                reply.answer.append(dns.rrset.from_text_list(name, 0, "IN", "A", list(now)))
            self._socket.sendto(reply.to_wire(), client)
