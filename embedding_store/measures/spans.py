"""Spans of traces, where a process is traced; nothing at all where it is not.

OpenTelemetry is an extra, so nothing here imports it: the process that is traced installs a `Tracer` (`traced_by`), and
whatever is timed or called meanwhile asks `PROCESS.tracer`, which is None in every other process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

__all__ = ["PROCESS", "TRACE_KEY", "TracedProcess", "Tracer", "VersionTrace", "carried", "span", "traced_by"]

TRACE_KEY = "traceparent"
"""Metadata of a call that says which span it belongs to, as W3C Trace Context writes it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VersionTrace:
    """The trace of one version of a job. Every process knows it without being told."""

    job: str
    version: int


class Tracer(Protocol):
    """What makes spans. Safe to use from many threads."""

    def version(self, trace: VersionTrace, begun: float) -> AbstractContextManager[None]:
        """The span that a trace consists of, open since `begun` (monotonic seconds), and current in the block."""

    def span(
        self, name: str, trace: VersionTrace | None, attributes: dict[str, str | int]
    ) -> AbstractContextManager[None]:
        """A span in a trace; None: within the current span, and nothing where there is none. Current in the block."""

    def ended(self, name: str, seconds: float) -> None:
        """A span within the current one that ends now; nothing where there is none."""

    def parent(self) -> str | None:
        """The current span as `TRACE_KEY` carries it; None: there is none."""

    def serving(self, method: str, parent: str) -> AbstractContextManager[None]:
        """The span of a call that is being answered; current in the block."""

    def begin_serving(self, method: str, parent: str) -> Callable[[], None]:
        """The same, ended by the function returned; current nowhere."""

    def carried(self, call: Callable[[], T]) -> Callable[[], T]:
        """The call, for another thread, with the current span of this one."""


class TracedProcess:
    """Whether this process is traced.

    Attributes:
        tracer: What makes its spans; None: it is not traced.
    """

    __slots__ = ("tracer",)

    def __init__(self) -> None:
        self.tracer: Tracer | None = None


PROCESS = TracedProcess()
"""This process."""


@contextmanager
def traced_by(tracer: Tracer) -> Iterator[None]:
    """Traces this process while the block runs. Channels and servers made before the block stay untraced."""
    before, PROCESS.tracer = PROCESS.tracer, tracer
    try:
        yield
    finally:
        PROCESS.tracer = before


def span(
    name: str, trace: VersionTrace | None = None, attributes: dict[str, str | int] | None = None
) -> AbstractContextManager[None]:
    """As `Tracer.span`; nothing in a process that is not traced."""
    return nullcontext() if PROCESS.tracer is None else PROCESS.tracer.span(name, trace, attributes or {})


def carried(call: Callable[[], T]) -> Callable[[], T]:
    """As `Tracer.carried`; the call itself in a process that is not traced."""
    return call if PROCESS.tracer is None else PROCESS.tracer.carried(call)
