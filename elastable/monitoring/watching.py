"""Serves what a process shows of itself while a block runs."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from rich.console import Console

from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.extras import needs
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.monitoring.page.views import Watched


def require_watchable(http: str | None, insecure: bool) -> None:
    """Raises now what `watched_over_http` would raise of its address: before a job builds its model."""
    if http is None:
        return
    with needs("--http", "monitoring"):
        from elastable.monitoring.http_server import require_servable
    require_servable(Address.parse(http), Credentials.from_environment(), insecure)


@contextmanager
def watched_over_http(http: str | None, insecure: bool, watched: Watched, console: Console) -> Iterator[None]:
    """While the block runs, the process is watched at an address.

    Args:
        http: `host:port`; None: nothing is served, and the libraries that it takes are not imported.
        insecure: As of `HttpServer`.

    Raises:
        BadInput: as `HttpServer`.
        NotInstalled: the extra "monitoring" is not installed.
    """
    if http is None:
        yield
        return
    with needs("--http", "monitoring"):
        from elastable.monitoring.endpoints import Endpoints
        from elastable.monitoring.http_server import HttpServer
    with (
        closing(Endpoints(watched)) as endpoints,
        HttpServer(Address.parse(http), endpoints.app, Credentials.from_environment(), insecure) as server,
    ):
        page = "" if watched.view is None else "live page, "
        console.print(f"{page}metrics and health at {server.url}", highlight=False, markup=False)
        try:
            yield
        finally:
            endpoints.end()
