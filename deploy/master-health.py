#!/usr/bin/env python
"""Exit 0 when the gRPC server at HOST:PORT says that it is serving, else 1: the container's health check.

It imports grpc and nothing of Elastable, as it runs every few seconds during training. It speaks TLS as
the variables say that every process of Elastable reads (docs/security.md); health checks need no token.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

DEADLINE_SECONDS = 5.0


def channel(address: str) -> grpc.Channel:
    """A channel secured as the environment says."""
    authority, certificate, key = (
        Path(path).read_bytes() if (path := os.environ.get(f"ELASTABLE_TLS_{name}")) else None
        for name in ("CA", "CERT", "KEY")
    )
    if authority is None and certificate is None:
        return grpc.insecure_channel(address)
    # Where a server asks clients for no certificate, no authority is set: its own certificate is known beside it.
    trusted = certificate if authority is None else authority
    name = os.environ.get("ELASTABLE_TLS_NAME")
    options = [("grpc.ssl_target_name_override", name)] if name else None
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(trusted, key, certificate), options)


def main(address: str) -> int:
    """Ask the standard health service at ``address`` once."""
    try:
        with channel(address) as opened:
            reply = health_pb2_grpc.HealthStub(opened).Check(
                health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS, wait_for_ready=False
            )
    except grpc.RpcError as error:
        print(f"{address}: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{address}: {error}", file=sys.stderr)
        return 1
    return 0 if reply.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: master-health.py HOST:PORT")
    sys.exit(main(sys.argv[1]))
