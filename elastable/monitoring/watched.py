"""What a process shows of itself to those who watch it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elastable.monitoring.metric import Source
from elastable.monitoring.page.views import View

__all__ = ["Watched"]


@dataclass(frozen=True, slots=True)
class Watched:
    """What a process shows of itself.

    Attributes:
        sources: Name -> metrics.
        not_ready: Why it cannot do its work now, by service; empty: it can.
        view: What its live page shows; None: it has none.
    """

    sources: Mapping[str, Source]
    not_ready: Callable[[], Mapping[str, str]]
    view: View | None = None
