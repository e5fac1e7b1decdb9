"""Checkpoints listed and opened: their tensors and rows, an increment's with those of what it builds upon."""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from elastable.embedding_store.contract.arrays import UInt8
from elastable.embedding_store.contract.malformed import DocumentFields
from elastable.embedding_store.contract.row_data import NEXT_VERSION, RowBlock, TableState
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import CheckpointError
from elastable.embedding_store.native.id_index import IdIndex
from elastable.embedding_store.tables.row_blocks import chosen_rows
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.master.api import Tensor
from elastable.master.checkpoints.dirty_rows import add_ids
from elastable.master.checkpoints.storage.checkpoint_files import MANIFEST, CheckpointFiles
from elastable.master.checkpoints.storage.checkpoint_locations import (
    checkpoint_names,
    files_at,
    located,
    read_manifest,
    version_named,
)
from elastable.master.checkpoints.storage.manifest import Manifest
from elastable.master.checkpoints.storage.tensor_file import in_order, tensors_in
from elastable.master.tasks.progress import Progress

DENSE = "dense.safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest has been read, and those of what it builds upon.

    All files exist and have the right size; their bytes are checked when they are read.

    Attributes:
        home: Its folder.
        name: Its own folder in there.
        base: What it builds upon; None: it is full.
    """

    home: CheckpointFiles
    name: str
    manifest: Manifest
    base: "Checkpoint | None" = None

    @property
    def address(self) -> str:
        """Where it is: a path of this machine, or a URL."""
        return self.home.at(self.name)

    @property
    def version(self) -> int:
        """The version that it holds."""
        return self.manifest.version

    @property
    def job(self) -> DocumentFields:
        """The description of the job that wrote it."""
        return dict(self.manifest.job)

    def progress(self) -> Progress:
        """How far the job was that wrote it."""
        return self.manifest.place()

    def dense(self) -> dict[str, Tensor]:
        """Dense variables, states and optimizer variables by key. Raises `CheckpointError`."""
        with suggesting_older(self):
            return dict(read_tensors(self, DENSE))

    def rows(self, table: str) -> Iterator[RowBlock]:
        """All rows of a table in blocks, each row once, in any order.

        Raises:
            CheckpointError: a file's bytes are not the ones that were written.
        """
        with suggesting_older(self):
            yield from chained_rows(self.chain(), table)

    def table_state(self, table: str) -> TableState:
        """What the table kept besides its rows. Raises `CheckpointError`."""
        entry = self.manifest.tables[table]
        if entry.state is None:
            return TableState()
        with suggesting_older(self):
            tensors = read_tensors(self, entry.state)
            counts, decay = tensors.get("admission_counts"), tensors.get("untouched_decay")
            if set(tensors) - {"admission_counts", "untouched_decay", "touch_times"} or (
                decay is not None and decay.shape != (1,)
            ):
                raise CheckpointError(f"{self.home.at(f'{self.name}/{entry.state}')}: it does not hold a table's state")
            return TableState(counts, None if decay is None else float(decay[0]), tensors.get("touch_times"))

    def chain(self) -> "tuple[Checkpoint, ...]":
        """This one, and what it builds upon, the newest first; the last is full."""
        chain = [self]
        while (base := chain[-1].base) is not None:
            chain.append(base)
        return tuple(chain)

    def verify(self) -> None:
        """Reads every file of the checkpoint and of what it builds upon.

        Raises:
            CheckpointError: the first whose bytes are not the ones that were written.
        """
        with suggesting_older(self):
            self.read_all()

    def read_all(self) -> None:
        """As `verify`, without looking for another checkpoint."""
        for one in self.chain():
            for _ in in_order(partial(read_tensors, one), one.manifest.files):
                pass


def open_checkpoint(place: str | Path, version: int | None = None) -> Checkpoint:
    """The checkpoint at `place`, or of those side by side in it the newest, or that of a version.

    Raises:
        CheckpointError: there is none, by the versions that there are; or a file is missing, cut off, changed or
            of another checkpoint, by name, and with an older checkpoint that is whole.
        BadInput: a URL of an unknown kind.
    """
    found = located(place)
    if found is None:
        raise CheckpointError(f"{place}: no checkpoint there; expected a folder ckpt-<version> with {MANIFEST}")
    home, name = found
    if version is not None:
        known = {order[0]: each for each in checkpoint_names(home) if (order := version_named(each))}
        if not version_named(name):  # an exported one has any name, and says itself what it is of
            known[open_named(home, name).version] = name
        if version not in known:
            raise CheckpointError(f"{place}: no checkpoint of version {version}, but of {', '.join(map(str, known))}")
        name = known[version]
    with suggesting_older(home, name):
        return open_named(home, name)


def open_named(home: CheckpointFiles, name: str) -> Checkpoint:
    """Opens the checkpoint of a name in a folder; an error does not name older ones.

    Raises:
        CheckpointError: as `open_checkpoint`, or one builds upon itself.
    """
    manifests: dict[str, Manifest] = {}  # the newest first; of any number, which calls within calls are not
    below: str | None = name
    try:
        while below is not None:
            if below in manifests:
                raise CheckpointError(f"{home.at(list(manifests)[-1])} builds upon itself")
            manifest = _manifest(home, below)
            _refuse_other_files(home, below, manifest)
            manifests[below] = manifest
            below = None if manifest.base is None else manifest.base.name
        found: Checkpoint | None = None
        for below, manifest in reversed(manifests.items()):
            _refuse_other_base(home, below, manifest, found)
            found = Checkpoint(home, below, manifest, found)
    except CheckpointError as error:
        if below == name or name not in manifests:
            raise
        raise CheckpointError(f"{home.at(name)} builds upon a checkpoint that cannot be used: {error}") from error
    assert found is not None
    return found


def _refuse_other_base(home: CheckpointFiles, name: str, manifest: Manifest, base: Checkpoint | None) -> None:
    if manifest.base is not None and base is not None and base.manifest.checksum != manifest.base.checksum:
        raise CheckpointError(
            f"{home.at(name)} builds upon another checkpoint than the one that is at {base.address} (version "
            f"{base.version}, written {base.manifest.written}): its own base has version {manifest.base.version}"
        )


def read_tensors(checkpoint: Checkpoint, file: str) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint, not of its bases."""
    place = f"{checkpoint.name}/{file}"
    if file not in checkpoint.manifest.files:  # a table may name any path
        raise CheckpointError(f"{checkpoint.home.at(checkpoint.name)}: {file!r} is none of the files in its manifest")
    try:
        content = checkpoint.home.read(place)
        whole = hashlib.sha256(content.data).hexdigest() == checkpoint.manifest.files[file].sha256
        tensors, note = tensors_in(content) if whole else ({}, _note(content))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.home.at(place)}: cannot be read: {error}") from error
    if whole:
        return tensors
    message = f"{checkpoint.home.at(place)}: its bytes are not the ones that were written"
    if note.get("version", str(checkpoint.version)) != str(checkpoint.version):
        message += f": it is a file of a checkpoint of version {note['version']}"
    raise CheckpointError(message)


def _tensors_of(checkpoint: Checkpoint, file: str, names: Collection[str]) -> dict[str, Tensor]:
    """As `read_tensors`, of a file that holds these tensors, each as long as the others."""
    tensors = read_tensors(checkpoint, file)
    missing = [name for name in names if name not in tensors]
    if missing or len({len(tensors[name]) if tensors[name].ndim else -1 for name in names}) > 1:
        found = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items()) or "nothing"
        raise CheckpointError(
            f"{checkpoint.home.at(f'{checkpoint.name}/{file}')}: holds {found}, where a checkpoint holds "
            f"{', '.join(names)} of as many rows"
        )
    return tensors


def _note(content: UInt8) -> dict[str, str]:
    """What a file says about itself, if it says anything."""
    try:
        return tensors_in(content)[1]
    except ValueError:
        return {}


@contextmanager
def suggesting_older(of: Checkpoint | CheckpointFiles, name: str = "") -> Iterator[None]:
    """Adds to a `CheckpointError` raised inside the newest older checkpoint in the same folder that is intact.

    It is one of the same job, where that is known.
    """
    try:
        yield
    except CheckpointError as error:
        home, name, job = (of.home, of.name, of.job.get("job")) if isinstance(of, Checkpoint) else (of, name, None)
        older = _older_good(home, name, job)
        if older is None:
            raise
        of_job = "" if job is not None else f" of job {older.job.get('job', '')}"
        raise CheckpointError(
            f"{error}; an older checkpoint next to it is intact: {older.address} (version {older.version}){of_job}"
        ) from error


def _older_good(home: CheckpointFiles, name: str, job: object) -> Checkpoint | None:
    order = version_named(name)
    if order is None:
        return None
    for other in reversed(checkpoint_names(home)):
        if (version_named(other) or order) < order:
            try:
                found = open_named(home, other)
                if job not in (None, found.job.get("job")):
                    continue
                found.read_all()
            except (CheckpointError, OSError):
                continue
            return found
    return None


def _manifest(home: CheckpointFiles, name: str) -> Manifest:
    place = f"{name}/{MANIFEST}"
    try:
        manifest = read_manifest(home, name)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"{home.at(place)}: cannot be read: {error}") from error
    order = version_named(name)
    if order is not None and order[0] != manifest.version:
        raise CheckpointError(
            f"{home.at(place)}: it is the manifest of another checkpoint, of version {manifest.version}"
        )
    return manifest


def _refuse_other_files(home: CheckpointFiles, name: str, manifest: Manifest) -> None:
    sizes = home.sizes(name)
    for file, entry in manifest.files.items():
        if file not in sizes:
            raise CheckpointError(f"{home.at(f'{name}/{file}')}: missing")
        if sizes[file] != entry.bytes:
            raise CheckpointError(
                f"{home.at(f'{name}/{file}')}: it has {sizes[file]} bytes, and was written with {entry.bytes}"
            )
    foreign = sorted(set(sizes) - set(manifest.files) - {MANIFEST})
    if foreign:
        raise CheckpointError(
            f"{home.at(f'{name}/{foreign[0]}')}: it does not belong to this checkpoint (its manifest does not name "
            "it); take it away"
        )


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """One checkpoint of a directory.

    Attributes:
        checkpoint: Opened; None: it cannot be used.
        damage: Why not; "": it can.
    """

    address: str
    checkpoint: Checkpoint | None
    damage: str = ""


def list_checkpoints(directory: str | Path, verify: bool = False) -> list[ListedCheckpoint]:
    """All checkpoints in a directory, the oldest version first.

    Args:
        directory: A path, or a URL that fsspec knows; a run directory, too.
        verify: Whether every file is read and compared with its checksum; else
            files only have to be there and of the right size.

    Raises:
        CheckpointError: the directory cannot be read, or holds no checkpoint.
        BadInput: as `files_at`.
    """
    try:
        for folder in (str(directory).rstrip("/") or ".", f"{directory}/checkpoints"):
            files = files_at(folder)
            names = checkpoint_names(files)
            if names:
                break
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error}") from error
    if not names:
        raise CheckpointError(f"{redacted(str(directory))}: no checkpoint there; expected folders ckpt-<version>")
    found = []
    for name in names:
        try:
            checkpoint = open_named(files, name)
            if verify:
                checkpoint.read_all()
        except CheckpointError as error:
            found.append(ListedCheckpoint(files.at(name), None, str(error)))
        else:
            found.append(ListedCheckpoint(files.at(name), checkpoint))
    return found


_ROWS, _IDS = ("ids", "weights", "slots"), ("ids",)


def chained_rows(chain: Sequence[Checkpoint], table: str) -> Iterator[RowBlock]:
    """All rows of a table.

    A row of a base counts if no newer checkpoint of the chain has it, and if
    it is on the newest list of all rows, where there is one.

    Args:
        chain: Checkpoints, the newest first; the last holds the table whole.
        table: Its name; every checkpoint of the chain has it, down to the first that is whole.
    """
    newer = IdIndex()
    live: IdIndex | None = None  # the newest list holds all that older ones could say
    for place, checkpoint in enumerate(chain):
        entry = checkpoint.manifest.tables[table]
        last = entry.whole or place == len(chain) - 1
        for tensors in in_order(partial(_tensors_of, checkpoint, names=_ROWS), entry.files):
            block = RowBlock(tensors["ids"], tensors["weights"], tensors["slots"], tensors.get("touches"), trained=True)
            counts = newer.positions_of(block.ids) < 0
            if live is not None:
                counts &= live.positions_of(block.ids) >= 0
            if not last:
                add_ids(newer, block.ids)
            block = block if counts.all() else chosen_rows(block, counts)
            if len(block.ids):
                yield _aged(block, entry.spec, checkpoint.version, chain[0].version)
        if last:
            return
        if entry.live is not None and live is None:
            live = IdIndex()
            for tensors in in_order(partial(_tensors_of, checkpoint, names=_IDS), entry.live):
                add_ids(live, tensors["ids"])


def _aged(block: RowBlock, spec: TableSpec, version: int, newest: int) -> RowBlock:
    """Rows that no commit changed since a version, as they are at the newest; the table was frozen in none between."""
    if block.touches is None or spec.eviction is None or version == newest:
        return block
    touches, every = block.touches.copy(), spec.eviction.every
    touches[touches[:, 0] == NEXT_VERSION, 0] = version + 1
    if newest // every > version // every:  # an eviction has begun to count anew how often rows are touched
        touches[:, 1] = 0
    return replace(block, touches=touches)
