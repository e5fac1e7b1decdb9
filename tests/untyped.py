"""What has no narrower type than its use: parsed JSON and YAML, and keyword arguments that are passed on."""

from __future__ import annotations

from typing import Any

__all__ = ["Keywords", "Parsed"]

Parsed = dict[str, Any]
"""An object of a JSON or YAML document, a checkpoint's state, or the names that a program has defined."""

Keywords = dict[str, Any]
"""Keyword arguments by name; their types are those of the function that takes them."""
