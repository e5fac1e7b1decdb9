"""What checkpoints are called: by their version, and which one of that version they are."""

from __future__ import annotations

import re

__all__ = ["checkpoint_name", "version_named"]

_NAME = re.compile(r"ckpt-(\d{10,})(?:-(\d+))?")


def checkpoint_name(version: int, taken: list[str]) -> str:
    """A name for a checkpoint of this version that sorts behind those of the same version in `taken`."""
    plain = f"ckpt-{version:010d}"
    again = [int(found[2] or 1) for name in taken if (found := _NAME.fullmatch(name)) and int(found[1]) == version]
    return f"{plain}-{max(again) + 1}" if again else plain


def version_named(name: str) -> tuple[int, int] | None:
    """(version, which one of this version) that the name of a checkpoint says; None: it is none of ours."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2] or 1))
