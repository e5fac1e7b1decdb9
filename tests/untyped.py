"""What has no narrower type than its use: parsed JSON and YAML, and keyword arguments that are passed on."""

from typing import Any

Parsed = dict[str, Any]
"""An object of a JSON or YAML document, a checkpoint's state, or the names that a program has defined."""

Keyword = Any
"""A keyword argument that is passed on; its type is that of the function that takes it."""

Keywords = dict[str, Keyword]
"""Such arguments by name."""
