"""URLs of memory stores, file stores and partitioned stores, read."""

import difflib
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, quote, unquote

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.support.address import Address

SERVERS = "servers:"
"""What the URL of store servers begins with."""

_UNITS = {"": 1, "B": 1, **{f"{prefix}iB": 1 << (10 * power) for power, prefix in enumerate("KMGT", 1)}}
_SIZE = re.compile(r"(\d{1,15})\s*([A-Za-z]*)")

# The comma between two URLs; those between the hosts of one stand before no scheme.
_NEXT_URL = re.compile(r",(?=memory(?:,|$)|[a-z]+(?:[:+][a-z]+)*://)")
_SIZES = ("budget", "log_bytes", "before_image_bytes")
TIER_OPTIONS = (*_SIZES, "log", "fsync", "flush", "accept_version", "acknowledged_in")
"""What the URL of a store with a tier may say of the engine in front of it; see `TierOptions`."""

_LEAST_BUDGET = 1 << 20
STRATEGIES = ("token", "encoding")


@dataclass(frozen=True, slots=True)
class MemoryUrl:
    """`memory[?log=/folder&fsync=interval&log_bytes=1GiB]`.

    Attributes:
        log: The folder of the store's history; None: its rows end with its process.
        fsync: When what is logged reaches the disk: `always`, `interval` or `never`.
        log_bytes: The log's size after which a new base is written; None: the default.
        accept_version: The store is opened at this version although a later one was acknowledged; None: at none.
    """

    log: Path | None = None
    fsync: str = "interval"
    log_bytes: int | None = None
    accept_version: int | None = None

    @classmethod
    def parse(cls, url: str) -> Self:
        """Reads a URL. Raises `BadInput`, which says what is wrong with it."""
        options = _options(url, url.partition("?")[2], ("log", "fsync", "log_bytes", "accept_version"))
        folder = options.get("log")
        if folder is None:
            if options:
                raise BadInput(f"store {url!r}: {', '.join(sorted(options))} is of a log: write memory?log=/folder too")
            return cls()
        if not folder.startswith("/") or folder == "/":
            raise BadInput(f"store {url!r}: write memory?log=/folder, a path from the root")
        log_bytes = byte_count(options["log_bytes"]) if "log_bytes" in options else None
        return cls(Path(folder), options.get("fsync", "interval"), log_bytes, _version(options))


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What the URL of a store with a tier may say of the engine in front of it.

    Attributes:
        budget: Bytes of memory for rows of all tables; None: a quarter of the memory here, at least 1 GiB.
        log: Where changes are logged: "own" (with the rows, in the tier's way), "none", or a folder.
        fsync: When what is logged in files reaches the disk: `always`, `interval` or `never`.
        log_bytes: Bytes of changes that are not in the tier yet; beyond it, commits wait. None: the default.
        flush_s: Seconds between two times that changed rows are written; None: the default.
        before_image_bytes: Of memory, for rows as they were at pinned versions; None: a quarter of the memory here.
        accept_version: As of `MemoryUrl`.
        acknowledged_in: A folder, outside of Redis, where the newest version of a store in Redis is noted; None:
            whoever opens it says where.
    """

    budget: int | None = None
    log: str | Path = "own"
    fsync: str = "interval"
    log_bytes: int | None = None
    flush_s: float | None = None
    before_image_bytes: int | None = None
    accept_version: int | None = None
    acknowledged_in: Path | None = None

    @classmethod
    def taken_from(cls, url: str) -> tuple[Self, str]:
        """The options of a URL, and the URL without them. Raises `BadInput`, which says what is wrong."""
        place, mark, query = url.partition("?")
        given = parse_qsl(query, keep_blank_values=True)
        options = {name: value for name, value in given if name in TIER_OPTIONS}
        rest = "&".join(f"{quote(name)}={quote(value)}" for name, value in given if name not in TIER_OPTIONS)
        sizes = {name: byte_count(options[name]) for name in _SIZES if name in options}
        if sizes.get("budget", _LEAST_BUDGET) < _LEAST_BUDGET:
            raise BadInput(f"budget={options['budget']}: at least 1MiB of memory is needed for rows")
        log: str | Path = options.get("log", "own")
        if log not in ("own", "none"):
            if not str(log).startswith("/") or log == "/":
                raise BadInput(f"log={log}: write log=own, log=none, or the folder of the log as a path from the root")
            log = Path(log)
        noted_in = options.get("acknowledged_in")
        if noted_in is not None and (not place.startswith("redis") or not noted_in.startswith("/")):
            raise BadInput(
                f"acknowledged_in={noted_in}: write it in the URL of a store in Redis, with a folder as a path from "
                "the root; of a store in files the newest version is noted next to its folder"
            )
        return (
            cls(
                sizes.get("budget"),
                log,
                options.get("fsync", "interval"),
                sizes.get("log_bytes"),
                _positive("flush", options["flush"]) if "flush" in options else None,
                sizes.get("before_image_bytes"),
                _version(options),
                None if noted_in is None else Path(noted_in),
            ),
            f"{place}?{rest}" if mark and rest else place,
        )


def file_folder(url: str) -> Path:
    """The folder of `file:///folder`. Raises `BadInput`, which says what is wrong with the URL."""
    place, _, query = url.removeprefix("file://").partition("?")
    if not place.startswith("/") or place == "/":
        raise BadInput(f"store {url!r}: write file:///folder, with three slashes, for the folder /folder")
    _options(url, query, TIER_OPTIONS)
    return Path(unquote(place))


def _version(options: Mapping[str, str]) -> int | None:
    text = options.get("accept_version")
    if text is not None and not (text.isascii() and text.isdigit() and len(text) < 20):
        raise BadInput(f"accept_version={text}: write the version that the error has named")
    return None if text is None else int(text)


def _positive(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise BadInput(f"{name}={text}: write a number of seconds above 0")
    return number


def byte_count(text: str) -> int:
    """The number that "1000", "64MiB" or "2 GiB" means. Raises `BadInput`."""
    found = _SIZE.fullmatch(text.strip())
    unit = None if found is None else _UNITS.get(found[2])
    if found is None or unit is None:
        raise BadInput(f"size {text!r}: write a whole number, or one with KiB, MiB, GiB or TiB behind it")
    return int(found[1]) * unit


def _options(url: str, query: str, known: tuple[str, ...]) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise BadInput(f"store {url!r}: {unknown_option(unknown[0], known)}")
    return options


def unknown_option(name: str, known: Collection[str]) -> str:
    """What to say of an option that a URL cannot have: those that it can, and which of them may be meant."""
    near = difflib.get_close_matches(name, known, 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"option {name!r} is unknown; known options are {', '.join(known)}{meant}"


def shard_urls(url: str) -> tuple[str, list[str]]:
    """Strategy and shards of `token:URL,URL,...` or `encoding:URL,URL,...`; of any other URL "" and none.

    Raises:
        BadInput: a shard is partitioned itself.
    """
    strategy, separator, rest = url.partition(":")
    if not separator or strategy not in STRATEGIES:
        return "", []
    shards = _NEXT_URL.split(rest)
    if any(shard.partition(":")[0] in STRATEGIES for shard in shards):
        raise BadInput(f"store {strategy}:...: a shard cannot be partitioned by URL; join stores in Python instead")
    return strategy, shards


def refuse_remote_shards(url: str) -> None:
    """Refuses `grpc://...`, whole or as a shard, for jobs: their master would pass every row on.

    Raises:
        BadInput: rows would be in another process.
    """
    strategy, shards = shard_urls(url)
    remote = [shard for shard in shards or [url] if shard.startswith("grpc://")]
    if remote:
        shown = f"{strategy}:{remote[0]},..." if strategy else url
        raise BadInput(
            f"store {shown}: every row and gradient of the job would pass the master; start elastable store where "
            "elastable serve runs now, and write --stores host:port,host:port instead"
        )


def servers_url(url: str, strategy: str) -> str:
    """`servers:...`, over which new tables are split by a strategy."""
    return url if strategy == "token" else f"{SERVERS}{strategy}:{url.removeprefix(SERVERS)}"


def servers_strategy(url: str) -> str:
    """How new tables are split over `servers:host:port,...` or `servers:encoding:host:port,...`."""
    strategy = url.removeprefix(SERVERS).partition(":")[0]
    return strategy if strategy in STRATEGIES else "token"


def server_addresses(url: str) -> list[str]:
    """The addresses in `servers:host:port,host:port,...`, in the order in which tables are split over them.

    Raises:
        BadInput: none, one that cannot be, or one that appears twice.
    """
    given = url.removeprefix(SERVERS).removeprefix(f"{servers_strategy(url)}:")
    addresses = [address.strip() for address in given.split(",")]
    for address in addresses:
        Address.parse(address)
    if len(set(addresses)) < len(addresses):
        raise BadInput(f"store {url!r}: an address appears twice, and each store server holds another part of the rows")
    return addresses


def url_of_server(url: str, number: int) -> str:
    """The part of a store that one of several store servers keeps: a separate folder or namespace.

    Args:
        url: memory, memory?log=/folder, file:///folder or redis://host:port.
        number: Of the server, counted from 0.
    """
    place, _, query = url.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    own = f"store-{number}"
    if place.startswith("file:"):
        place = f"{place.rstrip('/')}/{own}"
    elif place != "memory":
        options["namespace"] = f"{options['namespace']}/{own}" if options.get("namespace") else own
    if options.get("log", "own") not in ("own", "none"):
        options["log"] = f"{options['log'].rstrip('/')}/{own}"
    rest = "&".join(f"{quote(name)}={quote(value)}" for name, value in options.items())
    return f"{place}?{rest}" if rest else place


def outlives_process(url: str) -> bool:
    """Whether rows and the record of their version outlive the process that has the store at a URL open.

    Of store servers it is not known before they are asked, and may be.
    """
    if url.startswith(SERVERS):
        return True
    shards = shard_urls(url)[1] or [url]
    return all(
        re.match(r"(file|rediss?(\+sentinel)?):", shard) or (shard.startswith("memory?") and "log=" in shard)
        for shard in shards
    )
