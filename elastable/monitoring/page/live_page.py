"""The live page: one file, and what a browser may do with it."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib import resources

__all__ = ["PAGE", "LivePage"]


@dataclass(frozen=True, slots=True)
class LivePage:
    """A page that loads nothing.

    Attributes:
        html: All of it.
        policy: Its Content-Security-Policy: its own script and style, its own events, and nothing else.
    """

    html: str
    policy: str

    @classmethod
    def of(cls, html: str) -> LivePage:
        """With the policy that fits its script and style."""
        script, style = (_hash(html, tag) for tag in ("script", "style"))
        rules = (
            *("default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
            *("connect-src 'self'", f"script-src {script}", f"style-src {style}", "img-src data:"),
        )
        return cls(html, "; ".join(rules))


def _hash(html: str, tag: str) -> str:
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


PAGE = LivePage.of(resources.files("elastable.monitoring.page").joinpath("live_page.html").read_text("utf-8"))
"""Of a master, a parameter server or a store server."""
