#!/usr/bin/env python
"""Exit 0 when the gRPC server at HOST:PORT says that it is serving, else 1: the container's health check.

It imports grpc and nothing of Elastable, as it runs every few seconds beside the training.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

DEADLINE_SECONDS = 5.0


def main(address: str) -> int:
    """Ask the standard health service at ``address`` once."""
    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS, wait_for_ready=False
            )
        except grpc.RpcError as error:
            print(f"{address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0 if reply.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: master-health.py HOST:PORT")
    sys.exit(main(sys.argv[1]))
