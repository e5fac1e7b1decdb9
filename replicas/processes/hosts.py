"""Which processes share a host, and where others find it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

__all__ = ["own_addresses", "this_host"]


def this_host() -> str:
    """What processes that can meet on 127.0.0.1 have in common: the machine's boot and its network namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def own_addresses() -> tuple[str, ...]:
    """Those under which other machines may know this one: its name's, and that of its way out."""
    found: dict[str, None] = {}
    with suppress(OSError):
        for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM):
            found[str(entry[4][0])] = None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out:
        way_out.connect(("192.0.2.1", 9))  # RFC 5737: nobody's; nothing is sent
        found[way_out.getsockname()[0]] = None
    # What points back at oneself is of no use elsewhere: it comes last.
    return tuple(sorted(found or {socket.gethostname(): None}, key=lambda host: host.startswith("127.")))
