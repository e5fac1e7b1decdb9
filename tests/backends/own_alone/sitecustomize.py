"""Python imports this first, where this folder is on PYTHONPATH: some frameworks are as if they were not installed."""

import os
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

MISSING = os.environ.get("MISSING_FRAMEWORKS", "").split(",")
_find = PathFinder.find_spec


def _found(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
    return None if name in MISSING else _find(name, path, target)


PathFinder.find_spec = _found  # type: ignore[assignment, method-assign]
