"""Which processes share a host, and the addresses of this host."""

import os
import socket
from contextlib import suppress


def this_host() -> str:
    """Identifies the machine's boot and network namespace: equal for processes that can connect over 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def own_addresses() -> tuple[str, ...]:
    """This host's addresses for other machines: its name's, and that of its default route."""
    found: dict[str, None] = {}
    with suppress(OSError):
        for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM):
            found[str(entry[4][0])] = None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out:
        way_out.connect(("192.0.2.1", 9))  # reserved by RFC 5737; nothing is sent
        found[way_out.getsockname()[0]] = None
    # Loopback addresses are useless to others: they come last.
    return tuple(sorted(found or {socket.gethostname(): None}, key=lambda host: host.startswith("127.")))
