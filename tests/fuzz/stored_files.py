"""Files: those that Elastable wrote, changed by somebody else, and records as other programs write them."""

import hashlib
import json
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

import numpy as np

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.tiers.files.file_tier import MANIFEST_NAME
from elastable.master.api import JobSpec
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.dirty_rows import DirtyRows
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.writing import write_checkpoint
from elastable.master.commits.version_record import VersionRecord, job_as_json
from elastable.master.tasks.progress import Progress
from elastable.replicas.host_embeddings.host_embedding import load_host_embedding, save_host_embedding
from elastable.replicas.host_embeddings.host_table import HostEmbeddingOptimizerSpec
from elastable.replicas.knowledge_graphs.graph.triple_files import Names, read_columns
from elastable.replicas.knowledge_graphs.graph_run import GraphCheckpoints, RunProgress
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings
from elastable.worker.readers.batch.reader import ModelInputs, Reader
from tests.contracts.readers import FORMATS, Format
from tests.file_stores import file_store
from tests.fuzz.mutator import Mutator
from tests.fuzz.target import Finding, Target
from tests.master.checkpoints.jobs import JOB, created, dense_of, progress_of, train
from tests.replicas.host_embeddings.tables import create_host_table

_MANIFEST = "manifest.json"


class _Folder(Target):
    """A folder of files of which one is changed for each case, and put right after it."""

    def open(self) -> None:
        self.folder = Path(self.held.enter_context(TemporaryDirectory()))
        self.write()
        files = (path for path in sorted(self.folder.rglob("*")) if path.is_file() and path.name != "lock")
        self._whole = {path: path.read_bytes() for path in files}

    def case(self, m: Mutator) -> str | None:
        path = m.choice(list(self._whole))
        content = self._whole[path]
        changed = self.changed(m, path, content)
        try:
            for file, text in changed.items():
                file.write_bytes(text)
            self.read()
        finally:
            for file in changed:
                file.write_bytes(self._whole[file])
        return None

    @abstractmethod
    def write(self) -> None:
        """Writes what is to be read into `folder`."""

    @abstractmethod
    def read(self) -> None:
        """Reads all of it."""

    def changed(self, m: Mutator, path: Path, content: bytes) -> dict[Path, bytes]:
        """What is written in the place of a file, and of others that vouch for it."""
        return {path: m.mutated(content)}

    def check(self) -> None:
        self.read()


def _other_header(m: Mutator, content: bytes) -> bytes:
    """A safetensors file whose header is another one."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(m.mutated_json(json.loads(content[8:end]))).encode()
    return len(header).to_bytes(8, "little") + header + content[end:]


def _other_tensor(m: Mutator, content: bytes) -> bytes:
    """A safetensors file of other bytes, or one with another header."""
    return _other_header(m, content) if m.chance(0.6) else m.mutated(content)


class Checkpoints(_Folder):
    """A checkpoint and an increment upon it; changed, and often with checksums that vouch for the change."""

    name = "checkpoints"
    share = 8

    def write(self) -> None:
        with MemoryStore(1) as store:
            created(store)
            train(store, 3, 12)
            dirty = DirtyRows(store, b"0")
            write_checkpoint(self.folder, store, dense_of(3), JOB, progress_of(3))
            first = open_checkpoint(self.folder)
            for update in train(store, 1, 12):
                dirty.add(update)
            changes = dirty.take(b"1", b"0")
            write_checkpoint(self.folder, store, dense_of(4), JOB, progress_of(4), base=first, changes=changes)

    def read(self) -> None:
        checkpoint = open_checkpoint(self.folder)
        checkpoint.progress()
        checkpoint.dense()
        with MemoryStore(1) as store:
            restore_tables(checkpoint, store)

    def changed(self, m: Mutator, path: Path, content: bytes) -> dict[Path, bytes]:
        """A file as it is on a broken disk, or as somebody writes it who knows the checksums."""
        if m.chance(0.2):
            return super().changed(m, path, content)
        manifest = path.parent / _MANIFEST
        fields = json.loads(self._whole[manifest])
        changes = {}
        if path == manifest:
            fields = m.mutated_json(fields)
            if not isinstance(fields, dict):
                return {manifest: json.dumps(fields).encode()}
        else:
            changes[path] = _other_tensor(m, content)
            fields["files"][path.name] = {
                "sha256": hashlib.sha256(changes[path]).hexdigest(),
                "bytes": len(changes[path]),
            }
        if isinstance(fields.get("checksum"), str):
            del fields["checksum"]
            fields["checksum"] = _json_checksum(fields)
        return {**changes, manifest: json.dumps(fields).encode()}


def _json_checksum(fields: dict[str, object]) -> str:
    plain = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()


class FileStores(_Folder):
    """The folder of a store in files, which was closed cleanly."""

    name = "file-stores"
    share = 8

    def write(self) -> None:
        with file_store(self.folder, 1 << 20, 1) as store:
            created(store)
            train(store, 3, 12)

    def read(self) -> None:
        """Opens a copy, which opening changes, and reads every row."""
        with TemporaryDirectory() as home:
            store = file_store(Path(copytree(self.folder, Path(home) / "copy")), 1 << 20, 1)
            try:
                _read_all(store)
            finally:
                # What was changed on the disk may be noticed when it is written, too.
                store.close()

    def changed(self, m: Mutator, path: Path, content: bytes) -> dict[Path, bytes]:
        if path.name != MANIFEST_NAME or m.chance(0.2):
            return {path: m.mutated(content)}
        text, _, state = content[:-4].partition(b"\n")
        if m.chance(0.5):
            text = json.dumps(m.mutated_json(json.loads(text))).encode()
        else:
            state = m.mutated(state)
        body = text + b"\n" + state
        return {path: body + zlib.crc32(body).to_bytes(4, "little")}


def _read_all(store: EmbeddingStore) -> None:
    for name in store.specs():
        for _ in store.scan(name):
            pass
        store.lookup({name: np.arange(5, dtype=np.int64)})
        store.table_state(name)


class VersionRecords(Target):
    name = "version-records"
    share = 1000

    def open(self) -> None:
        progress = Progress(3, metrics=(np.ones(2, np.float32),), sequences={"w": 3}, logs={"loss": 0.5}, done=(1, 2))
        self.whole = VersionRecord(job_as_json(JobSpec()), progress, dense_of(3)).to_bytes()

    def case(self, m: Mutator) -> str | None:
        VersionRecord.from_bytes(_other_tensor(m, self.whole))
        return None


class HostEmbeddingFiles(_Folder):
    """The file of a host embedding; often with a checksum that vouches for the change."""

    name = "host-embedding-files"
    share = 20

    def write(self) -> None:
        optimizer = HostEmbeddingOptimizerSpec(0.1, "adam", accumulation_factor=2)
        self.table = create_host_table("t", (13, 3), partition_strategy="TOKEN", optimizer_spec=optimizer)
        save_host_embedding(self.table, self.folder / "t.safetensors")

    def read(self) -> None:
        load_host_embedding(self.table, self.folder / "t.safetensors")

    def changed(self, m: Mutator, path: Path, content: bytes) -> dict[Path, bytes]:
        return {path: _other_tensor(m, content)}


class GraphFiles(_Folder):
    """A checkpoint of a knowledge graph's model; often with checksums that vouch for the change."""

    name = "graph-checkpoints"
    share = 20

    def write(self) -> None:
        state = {"entities": np.ones((4, 2), np.float32), "step": np.int64(3) * np.ones((), np.int64)}
        GraphCheckpoints(self.folder).write(state, TrainSettings(), RunProgress(1, 3), {"entities": 4})

    def read(self) -> None:
        GraphCheckpoints(self.folder).best()

    def changed(self, m: Mutator, path: Path, content: bytes) -> dict[Path, bytes]:
        if path.name != _MANIFEST or m.chance(0.2):
            return {path: m.mutated(content)}
        fields = m.mutated_json(json.loads(content))
        if isinstance(fields, dict) and "checksum" in fields:
            del fields["checksum"]
            fields["checksum"] = _json_checksum(fields)
        return {path: json.dumps(fields).encode()}


class _DataFile(Target):
    suffix: str

    def open(self) -> None:
        self.folder = Path(self.held.enter_context(TemporaryDirectory()))
        self.path = self.folder / f"data{self.suffix}"

    @abstractmethod
    def content(self, m: Mutator) -> bytes:
        """What the file contains."""

    @abstractmethod
    def read(self, m: Mutator) -> None:
        """Reads all of it."""

    def case(self, m: Mutator) -> str | None:
        self.path.write_bytes(self.content(m))
        self.read(m)
        return None


_KINDS = ("int64", "int32", "uint64", "float32", "float64", "string", "bool")


def _inputs(m: Mutator, names: Sequence[str]) -> ModelInputs:
    return ModelInputs({name: m.choice(_KINDS) for name in names if m.chance(0.2)}, own_step=m.chance(0.5))


def _every_record(reader: Reader) -> None:
    """Every record, and what the reader says of itself."""
    total = len(reader)
    for start in range(0, total, 7):
        wanted = np.arange(start, min(total, start + 7))
        x, *_ = reader.take(wanted)
        for name, column in x.items() if isinstance(x, dict) else ():
            if len(column) != len(wanted):
                raise Finding(f"column {name!r} of {len(wanted)} records has {len(column)} of them")


_COLUMNS = ("user", "item", "price", "name", "a", "b", "id", "t", "x", "list")


class _ReaderFiles(_DataFile):
    """Files of a format of records as programs and people write them, changed anywhere, and worse."""

    form: Format
    share = 50

    def open(self) -> None:
        super().open()
        self.seeds = self.form.seeds()

    def content(self, m: Mutator) -> bytes:
        return m.mutated(m.choice(self.seeds), 5)

    def read(self, m: Mutator) -> None:
        reader = self.form.reader(self.path, **{name: m.choice(values) for name, values in self.form.options.items()})
        _every_record(reader.for_inputs(_inputs(m, _COLUMNS)))


for _name, _form in FORMATS.items():
    type(f"{_name.title()}Files", (_ReaderFiles,), {"name": _name, "suffix": f".{_name}", "form": _form})


class TripleFiles(_DataFile):
    name = "triples"
    share = 40
    suffix = ".txt"

    def content(self, m: Mutator) -> bytes:
        return m.mutated(b"anna\tknows\tbert\nbert\tknows\tcarl\n\ncarl\tlikes\tanna\n", 4)

    def read(self, m: Mutator) -> None:
        if m.chance(0.7):
            read_columns(self.path)
        else:
            Names.load(self.path)
