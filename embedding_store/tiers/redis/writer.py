"""The right to change what lies in Redis, and what every change has to do with pins and versions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastable.embedding_store.contract.row_source import refuse_other_version
from elastable.embedding_store.errors import StaleVersion
from elastable.embedding_store.tiers.redis.before_images import Moment
from elastable.embedding_store.tiers.redis.catalog import Catalog
from elastable.embedding_store.tiers.redis.ledger import Kept, Ledger
from elastable.embedding_store.tiers.redis.ownership import Ownership
from elastable.embedding_store.tiers.redis.pin_registry import PinRegistry, given_up_pin
from elastable.embedding_store.tiers.redis.recovery import read_stamps, require_way_back, take_back
from elastable.embedding_store.tiers.redis.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.registry import Registry, read_registry, version_of
from elastable.embedding_store.tiers.redis.schema_1 import before_ledger_key, records_key, serial_key, version_key
from elastable.embedding_store.tiers.redis.topology import Topology
from elastable.embedding_store.tiers.redis.transactions import run_transactions
from elastable.embedding_store.tiers.redis.url import RedisUrl

__all__ = ["Writer"]

_LOG = logging.getLogger(__name__)


class Writer:
    """One process' right to write, and what it knows of what it left. For one thread at a time.

    Attributes:
        ownership: Whether it may write.
        ledger: What is kept of before-images.
        records: Versions of which there is a record.
    """

    def __init__(self, url: RedisUrl, topology: Topology, reload: Callable[[Deadline], Catalog]) -> None:
        """`topology` reads; `reload` reads the catalog anew."""
        self.ownership = Ownership(url, topology)
        self.ledger = Ledger({})
        self.records: set[int] = set()
        self._url, self._topology, self._reload = url, topology, reload
        self._namespace = url.namespace

    @property
    def topology(self) -> Topology:
        """The servers, with connections that may write. Raises `StoreFailed` before `require` or `recover`."""
        return self.ownership.writing

    def require(self, deadline: Deadline) -> None:
        """Takes over, the first time; what the writer before left half done is taken back.

        Raises:
            StoreFailed, Unavailable, DeadlineExceeded: as `recover`.
        """
        if self.ownership.owner is None:
            self.recover(None, deadline)

    def recover(self, version: int | None, deadline: Deadline) -> int:
        """As `EmbeddingStore.recover`: takes over, too. Where it breaks off, another one ends it.

        Raises:
            StaleVersion, FutureVersion: the store cannot go back to that version; nothing has changed.
            StoreFailed: also where a before-image is lost.
        """
        self.ownership.take_over(deadline)
        catalog = self._reload(deadline)
        registry = read_registry(self._topology, self._namespace, deadline)
        target = registry.version if version is None else version
        if target != registry.version - 1 or target < 0:
            refuse_other_version(registry.version, target)
        self.load(deadline)
        stamps = read_stamps(self._topology, catalog, deadline)
        if target < registry.version:
            self._require_unchanged(registry, target)
            require_way_back(self._topology, catalog, stamps, target, deadline)
            self._withdraw(registry, target, deadline)
        taken = take_back(self.topology, catalog, stamps, target, self._url.deadline)
        self._tidy(registry, target, deadline)
        self.ownership.declare(deadline)
        if taken:
            _LOG.warning("%s: %d rows were taken back to version %d", self._url, taken, target)
        return taken

    def load(self, deadline: Deadline) -> None:
        """Reads what the writer before knew."""
        ledger, records = before_ledger_key(self._namespace), records_key(self._namespace)
        told, versions = self._topology.call([(ledger, ("HGETALL", ledger)), (ledger, ("HKEYS", records))], deadline)
        self.ledger, self.records = Ledger.of(told), {version_of(version) for version in versions}

    def settle(self, registry: Registry, more_bytes: int, deadline: Deadline) -> Registry:
        """Takes out pins whose lease has ended, and gives up those that would cost too much with `more_bytes`."""
        standing = registry.standing()
        gone = {token: None for token, pin in registry.pins.items() if pin.ends_ms <= registry.now_ms}
        pins = {token: pin for token, pin in registry.pins.items() if token not in gone}
        changes = dict[bytes, object](gone)
        while standing:
            oldest = min(pin.moment for pin in standing.values())
            size = self.ledger.beyond(oldest)[1] + more_bytes
            if size <= self._url.before_image_bytes:
                break
            why = (f"it was given up, as before-images of what is pinned would take {size} bytes, and "
                   f"before_image_bytes allows {self._url.before_image_bytes}")  # fmt: skip
            for token in [token for token, pin in standing.items() if pin.moment == oldest]:
                pins[token] = given_up_pin(standing.pop(token), why)
                changes[token] = pins[token]
                _LOG.warning("the pin of version %d at %s is gone: %s", oldest.version, self._url, why)
        PinRegistry(self.topology, self._namespace).settle({token: pins.get(token) for token in changes}, deadline)
        return Registry(registry.version, registry.owner, registry.serial, pins, registry.now_ms)

    def purge(self, catalog: Catalog, registry: Registry, deadline: Deadline) -> None:
        """Drops before-images that a pin needed which is gone."""
        names = self.ledger.obsolete(registry.oldest_pin(), registry.version)
        if names:
            fields = [field for name in names for field in (name.weights_field, name.slots_field)]
            self.topology.call([(key, ("HDEL", key, *fields)) for _, _, key in catalog.names], deadline)

    @contextmanager
    def outside_commits(self, deadline: Deadline) -> Iterator[Registry]:
        """Makes known that rows change outside a commit, for as long as the block lasts; the registry then.

        No version can be pinned meanwhile, so the pins in it are all there are.
        """
        self.require(deadline)
        before = read_registry(self._topology, self._namespace, deadline)
        self.ownership.require(before.owner)
        serial = before.serial | 1
        self._set_serial(serial, deadline)
        try:
            yield self.settle(read_registry(self._topology, self._namespace, deadline), 0, deadline)
        finally:
            self._set_serial(serial + 1, Deadline(self._url.deadline))

    def note(self, name: Moment, kept: Kept, deadline: Deadline) -> None:
        """Notes in the ledger what a change outside commits is about to leave."""
        key = before_ledger_key(self._namespace)
        self.topology.call([(key, words) for words in self.ledger.written(key, name, kept)], deadline)
        self.ledger.entries[name] = kept

    def _set_serial(self, serial: int, deadline: Deadline) -> None:
        key = serial_key(self._namespace)
        self.topology.call([(key, ("SET", key, serial))], deadline)

    def _require_unchanged(self, registry: Registry, target: int) -> None:
        kept = self.ledger.entries.get(Moment(target + 1))
        if kept is None or kept.serial != registry.serial:
            raise StaleVersion(
                f"the store at {self._url} cannot go back to version {target}: rows were put, deleted or declared "
                f"to be version {registry.version} since, outside commits"
            )

    def _withdraw(self, registry: Registry, target: int, deadline: Deadline) -> None:
        """The version goes first: partitions of the later one are then what a commit left that broke off."""
        why = f"the commit of version {target + 1} was taken back"
        late = {token: given_up_pin(pin, why) for token, pin in registry.standing().items() if pin.version > target}
        PinRegistry(self.topology, self._namespace).settle(late, deadline)
        key, records = version_key(self._namespace), records_key(self._namespace)
        words = [("SET", key, target), *([("HDEL", records, target + 1)] if target + 1 in self.records else [])]
        run_transactions(self.topology, [(key, words)], deadline)
        self.records.discard(target + 1)

    def _tidy(self, registry: Registry, target: int, deadline: Deadline) -> None:
        """The ledger forgets what was taken back; a change outside commits that broke off is over."""
        key = before_ledger_key(self._namespace)
        beyond = [name for name in self.ledger.entries if name.version > target]
        commands = self.ledger.removed(key, beyond)
        if registry.serial % 2:
            commands.append(("SET", serial_key(self._namespace), registry.serial + 1))
        self.topology.call([(key, words) for words in commands], deadline)
        for name in beyond:
            del self.ledger.entries[name]
