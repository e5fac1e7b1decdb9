"""URLs of memory stores, file stores and partitioned stores, read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, unquote

from elastable.embedding_store.errors import BadInput

__all__ = ["FileUrl", "MemoryUrl", "byte_count", "shard_urls"]

_UNITS = {"": 1, "B": 1, **{f"{prefix}iB": 1 << (10 * power) for power, prefix in enumerate("KMGT", 1)}}
_SIZE = re.compile(r"(\d{1,15})\s*([A-Za-z]*)")

# The comma between two URLs; those between the hosts of one stand before no scheme.
_NEXT_URL = re.compile(r",(?=memory(?:,|$)|[a-z]+(?:[:+][a-z]+)*://)")
_STRATEGIES = ("token", "encoding")


@dataclass(frozen=True, slots=True)
class MemoryUrl:
    """`memory[?log=/folder&fsync=interval&log_bytes=1GiB]`.

    Attributes:
        log: The folder of the store's history; None: its rows end with its process.
        fsync: When what is logged reaches the disk: `always`, `interval` or `never`.
        log_bytes: The log's size after which a new base is written; None: the default.
    """

    log: Path | None = None
    fsync: str = "interval"
    log_bytes: int | None = None

    @classmethod
    def parse(cls, url: str) -> Self:
        """Reads a URL. Raises `BadInput`, which says what is wrong with it."""
        options = _options(url, url.partition("?")[2], ("log", "fsync", "log_bytes"))
        folder = options.get("log")
        if folder is None:
            if options:
                raise BadInput(f"store {url!r}: {', '.join(sorted(options))} is of a log: write memory?log=/folder too")
            return cls()
        if not folder.startswith("/") or folder == "/":
            raise BadInput(f"store {url!r}: write memory?log=/folder, a path from the root")
        log_bytes = byte_count(options["log_bytes"]) if "log_bytes" in options else None
        return cls(Path(folder), options.get("fsync", "interval"), log_bytes)


@dataclass(frozen=True, slots=True)
class FileUrl:
    """`file:///folder[?budget=2GiB&unclean=drop]`.

    Attributes:
        folder: Of the store.
        budget: Bytes of memory for rows; None: the store's default.
        unclean: As `FileStore` takes it.
    """

    folder: Path
    budget: int | None = None
    unclean: str = "refuse"

    @classmethod
    def parse(cls, url: str) -> Self:
        """Reads a URL. Raises `BadInput`, which says what is wrong with it."""
        place, _, query = url.removeprefix("file://").partition("?")
        if not place.startswith("/") or place == "/":
            raise BadInput(f"store {url!r}: write file:///folder, with three slashes, for the folder /folder")
        options = _options(url, query, ("budget", "unclean"))
        budget = byte_count(options["budget"]) if "budget" in options else None
        return cls(Path(unquote(place)), budget, options.get("unclean", "refuse"))


def byte_count(text: str) -> int:
    """The number that "1000", "64MiB" or "2 GiB" stands for. Raises `BadInput`."""
    found = _SIZE.fullmatch(text.strip())
    unit = None if found is None else _UNITS.get(found[2])
    if found is None or unit is None:
        raise BadInput(f"size {text!r}: write a whole number, or one with KiB, MiB, GiB or TiB behind it")
    return int(found[1]) * unit


def _options(url: str, query: str, known: tuple[str, ...]) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise BadInput(f"store {url!r}: option {unknown[0]!r} is unknown; known options are {', '.join(known)}")
    return options


def shard_urls(url: str) -> tuple[str, list[str]]:
    """Strategy and shards of `token:URL,URL,...` or `encoding:URL,URL,...`; of any other URL "" and none.

    Raises:
        BadInput: a shard is partitioned itself.
    """
    strategy, separator, rest = url.partition(":")
    if not separator or strategy not in _STRATEGIES:
        return "", []
    shards = _NEXT_URL.split(rest)
    if any(shard.partition(":")[0] in _STRATEGIES for shard in shards):
        raise BadInput(f"store {strategy}:...: a shard cannot be partitioned by URL; join stores in Python instead")
    return strategy, shards
