"""The manifest of a checkpoint: what is in it, of which files, and what it is based on."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from elastable.embedding_store.contract.malformed import MALFORMED, DocumentFields
from elastable.embedding_store.contract.spec import TableSpec, spec_from_json, spec_to_json
from elastable.embedding_store.errors import CheckpointError
from elastable.embedding_store.shards.server_contract import SavedFile
from elastable.master.tasks.progress import Progress

_FORMAT = 4


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that an increment is based on: its name in the same folder, version, and manifest checksum."""

    name: str
    version: int
    checksum: str


@dataclass(frozen=True, slots=True)
class TableEntry:
    """One table of a checkpoint.

    Attributes:
        rows: That hold a value of their own at the checkpoint's version.
        written: Rows in `files`.
        files: Blocks of rows.
        whole: Whether `files` hold all rows; else those that changed since the base.
        live: Of a table of an increment that gave up rows: files of the ids of
            all rows that there are; None: none was given up since the base.
        state: File of what the table keeps besides its rows (`TableState`); None: nothing.
    """

    spec: TableSpec
    rows: int
    written: int
    files: tuple[str, ...]
    whole: bool = True
    live: tuple[str, ...] | None = None
    state: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        version: The version that it holds.
        job: The description of the job that wrote it (`elastable.master.api.JobSpec`).
        progress: How far the job was (`elastable.master.tasks.progress.Progress`), as plain JSON.
        tables: Table name -> what there is of it.
        files: Name -> every file but the manifest.
        base: What an increment builds upon; None: the checkpoint is full.
        written: When, in UTC, as ISO 8601.
        checksum: sha256 of everything above, in hexadecimal; computed when it is not given.
    """

    version: int
    job: Mapping[str, object]
    progress: Mapping[str, object]
    tables: Mapping[str, TableEntry]
    files: Mapping[str, SavedFile]
    base: Base | None = None
    written: str = ""
    checksum: str = field(default="")

    def __post_init__(self) -> None:
        if not self.checksum:
            object.__setattr__(self, "checksum", _checksum(self._fields()))

    @property
    def kind(self) -> str:
        """ "full" or "increment"."""
        return "full" if self.base is None else "increment"

    @property
    def size(self) -> int:
        """Bytes of all files, but the manifest."""
        return sum(entry.bytes for entry in self.files.values())

    @property
    def rows(self) -> int:
        """Of all tables, at the checkpoint's version."""
        return sum(entry.rows for entry in self.tables.values())

    def place(self) -> Progress:
        """How far the job was that wrote it. Raises `CheckpointError`."""
        return Progress.from_json(json.dumps(self.progress))

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        return json.dumps({**self._fields(), "checksum": self.checksum}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: bytes) -> "Manifest":
        """What `to_json` wrote.

        Raises:
            CheckpointError: the text is no manifest, not as it was written, or of another format.
        """
        try:
            fields = json.loads(text)
            if fields.get("format") != _FORMAT:
                raise CheckpointError(f"format {fields.get('format')!r}; this version reads format {_FORMAT}")
            checksum = fields.pop("checksum")
            if _checksum(fields) != checksum:
                raise CheckpointError("its bytes are not the ones that were written")
            return _parsed(fields, checksum)
        except MALFORMED as error:
            raise CheckpointError(f"it is no manifest of a checkpoint: {error}") from error

    def _fields(self) -> dict[str, object]:
        return {
            "format": _FORMAT,
            "version": self.version,
            "kind": self.kind,
            "base": None if self.base is None else asdict(self.base),
            "written": self.written,
            "rows": self.rows,
            "job": dict(self.job),
            "progress": dict(self.progress),
            "tables": {
                name: {**asdict(entry), "spec": json.loads(spec_to_json(entry.spec))}
                for name, entry in self.tables.items()
            },
            "files": {name: asdict(entry) for name, entry in self.files.items()},
        }


def _checksum(fields: Mapping[str, object]) -> str:
    plain = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode()).hexdigest()


def _parsed(fields: DocumentFields, checksum: str) -> Manifest:
    tables = {
        str(name): TableEntry(
            spec_from_json(json.dumps(entry["spec"])),
            int(entry["rows"]),
            int(entry["written"]),
            tuple(entry["files"]),
            bool(entry["whole"]),
            None if entry["live"] is None else tuple(entry["live"]),
            entry["state"],
        )
        for name, entry in fields["tables"].items()
    }
    files = {str(name): SavedFile(entry["sha256"], int(entry["bytes"])) for name, entry in fields["files"].items()}
    base = None if fields["base"] is None else Base(**fields["base"])
    _require_in_folder((*files, *(() if base is None else (base.name,))))
    for name in ("job", "progress"):
        if not isinstance(fields[name], dict):
            raise TypeError(f"its {name} is {fields[name]!r}")
    return Manifest(
        int(fields["version"]), fields["job"], fields["progress"], tables, files, base, str(fields["written"]), checksum
    )


def _require_in_folder(names: Iterable[object]) -> None:
    """Raises `ValueError` for a name that would lead out of the folder that it is read from."""
    for name in names:
        if not isinstance(name, str) or name in ("", ".", "..") or any(part in name for part in "/\\\0"):
            raise ValueError(f"it names {name!r}, which is no name of a file in its folder")
