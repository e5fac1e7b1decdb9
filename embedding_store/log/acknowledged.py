"""The newest version of a store that was acknowledged, noted outside of it: so it shows what the store has lost."""

import logging
import os
import re
import threading
from dataclasses import dataclass, replace
from pathlib import Path

from elastable.embedding_store.errors import StoreBroken, StoreFailed
from elastable.embedding_store.log.contract import Log
from elastable.embedding_store.log.framing import crc32_of
from elastable.embedding_store.support.checked_files import OpenFile, open_regular, store_failures

_log = logging.getLogger(__name__)

_FORM = re.compile(
    rb"(version (\d{1,20}), entry (\d{1,20}) \(([0-9a-f]{8})\) of store ([0-9a-f]{0,16})), check ([0-9a-f]{8}) *\n"
)
_BYTES = 128  # of the file, always: it is written in one call, and never grows


@dataclass(frozen=True, slots=True)
class Noted:
    """A moment of a store.

    Attributes:
        version: Its version.
        sequence: The newest entry of its log.
        check: `Header.check` of that entry, which depends on all entries before: no other store has it there.
        identity: Hexadecimal text that no other store has; "": not known.
    """

    version: int
    sequence: int
    check: int
    identity: str = ""

    @classmethod
    def of(cls, log: Log, version: int, identity: str = "") -> "Noted":
        """The newest moment of a log, which leads to a version."""
        return cls(version, log.last, log.check_at(log.last) or 0, identity)


def acknowledged_beside(folder: Path) -> Path:
    """The file of a store in a folder: next to the folder, which may be lost as a whole."""
    return folder.with_name(f"{folder.name}.acknowledged")


class AcknowledgedFile(OpenFile):
    """A file of one line, written anew after every append, before anybody hears of the version.

    It is not brought to the disk by force, which would take as long as to log the version itself: it survives the death
    of the process, and after a loss of power may say less than was acknowledged. It never says more.
    """

    def __init__(self, path: Path | None, accept_version: int | None = None) -> None:
        """Opens nothing yet.

        Args:
            path: Of the file, outside of the store; None: nothing is noted.
            accept_version: The store is opened at this version although a later one was acknowledged; None: at none.
        """
        self.path, self._accept_version = path, accept_version
        self._guard = threading.RLock()
        self._last: Noted | None = None
        self._warned = False

    def put(self, noted: Noted) -> None:
        """Notes a moment. A file that cannot be written is warned of once: the store goes on without it."""
        if self.path is None:
            return
        entry = b"version %d, entry %d (%08x)" % (noted.version, noted.sequence, noted.check)
        text = b"%b of store %b" % (entry, noted.identity.encode())
        line = b"%b, check %08x" % (text, crc32_of(text))
        with self._guard:
            self._last = noted
            try:
                if self.fd < 0:
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                os.pwrite(self.fd, line.ljust(_BYTES - 1) + b"\n", 0)
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    _log.warning(
                        "%s cannot be written (%s): what the store loses may not be noticed", self.path, error.strerror
                    )

    def identify(self, identity: str) -> None:
        """Notes whose moment the last one was, which the store knows by now."""
        with self._guard:
            if self._last is not None and self._last.identity != identity:
                self.put(replace(self._last, identity=identity))

    def require(self, log: Log, found: Noted, place: str) -> None:
        """Compares a store with what was noted.

        Args:
            log: Its log.
            found: Its newest moment.
            place: Of the store, for messages.

        Raises:
            StoreBroken: it is behind what was acknowledged, or another store; names both versions.
            StoreFailed: the file cannot be read, or is corrupt.
        """
        noted = self._last = self._read()
        version = found.version
        if noted is not None and noted.sequence > found.sequence:
            acknowledged = f"version {noted.version} (entry {noted.sequence}) was acknowledged, as {self.path} says"
        elif noted is not None and not self._is_of(log, found, noted):
            acknowledged = f"version {noted.version} of another store was acknowledged, as {self.path} says"
        elif log.reached > log.last:
            acknowledged = f"log entry {log.reached} was appended"
        else:
            return
        told = f"{place} is at version {version} (log entry {found.sequence}), but {acknowledged}"
        if version != self._accept_version:
            raise StoreBroken(
                f"{told}: the newest entries of its log are lost, or it is another store. Go back to a checkpoint; or "
                f"write accept_version={version} in the store's URL to go on at version {version} all the same"
            )
        _log.warning("%s: accepted by accept_version=%d", told, version)
        if log.reached > log.last:
            log.truncate(log.last)
        self.put(found)

    @staticmethod
    def _is_of(log: Log, found: Noted, noted: Noted) -> bool:
        """Whether what was noted was a moment of this store, as far as one can tell."""
        same = noted.identity == found.identity or not (noted.identity and found.identity)
        return same and log.check_at(noted.sequence) in (None, noted.check)

    def forget(self) -> None:
        """Notes nothing any more, as the store was deleted."""
        self.close()
        if self.path is not None:
            with store_failures(self.path, "cannot be removed"):
                self.path.unlink(missing_ok=True)

    def _read(self) -> Noted | None:
        """What was noted; None: nothing."""
        if self.path is None or not self.path.exists():
            return None
        with store_failures(self.path, "cannot be read"), open(open_regular(self.path), "rb") as file:
            content = file.read(_BYTES + 1)
        found = _FORM.fullmatch(content)
        if found is None or int(found[6], 16) != crc32_of(found[1]):
            if not content:  # the disk was full when it was made
                return None
            raise StoreFailed(f"{self.path} is corrupt: it says {content[:80]!r}; remove it to go without it")
        return Noted(int(found[2]), int(found[3]), int(found[4], 16), found[5].decode())
