"""The standard health service: what a server says of itself and of each of its services."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import grpc
from grpc_health.v1 import health_pb2

from elastable.embedding_store.wire.server.handlers import Handler

__all__ = ["Health", "NotReady"]

NotReady = Callable[[], str | None]
"""Says why a service cannot do its work now; None: it can. It answers at once."""

_STOPPING = "the server is stopping"


class Health:
    """Asks the services of one server whether they are ready, each time that somebody wants to know.

    Args:
        services: Full name of each service -> what it says.
    """

    def __init__(self, services: Mapping[str, NotReady]) -> None:
        self._services = dict(services)
        self._stopping = False

    def stop(self) -> None:
        """Nothing is ready from now on."""
        self._stopping = True

    def not_ready(self) -> dict[str, str]:
        """Why services are not ready, by name; those that are ready are left out."""
        said = {name: _STOPPING if self._stopping else ask() for name, ask in self._services.items()}
        return {name: why for name, why in said.items() if why is not None}

    def handler(self) -> Handler:
        """Of `Check`. `Watch` is not served: it keeps calls open, and nothing needs it."""
        return grpc.unary_unary_rpc_method_handler(
            self._check,
            health_pb2.HealthCheckRequest.FromString,
            health_pb2.HealthCheckResponse.SerializeToString,
        )

    def _check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """SERVING: the service, or with an empty name each of them, is ready."""
        if request.service and request.service not in self._services:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            return health_pb2.HealthCheckResponse()
        waiting = self.not_ready()
        serves = request.service not in waiting if request.service else not (waiting or self._stopping)
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if serves else status.NOT_SERVING)
