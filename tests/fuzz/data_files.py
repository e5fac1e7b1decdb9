"""Files of records as other programs write them: CSV, Parquet, triples."""

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from elastable.replicas.knowledge_graphs.graph.names import Names
from elastable.replicas.knowledge_graphs.graph.triple_files import read_columns
from elastable.worker.readers.batch.reader import ModelInputs, Reader
from tests.contracts.readers import FORMATS, Format
from tests.fuzz.mutator import Mutator
from tests.fuzz.target import Finding, Target


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


_COLUMNS = ("user", "item", "price", "name", "a", "b", "id", "t", "x", "list")
_KINDS = ("int64", "int32", "uint64", "float32", "float64", "string", "bool")


def _inputs(m: Mutator, names: Sequence[str]) -> ModelInputs:
    return ModelInputs({name: m.choice(_KINDS) for name in names if m.chance(0.2)}, own_step=m.chance(0.5))


def _read_all(reader: Reader) -> None:
    """Every record, and what the reader says of itself."""
    total = len(reader)
    for start in range(0, total, 7):
        wanted = np.arange(start, min(total, start + 7))
        x, *_ = reader.take(wanted)
        for name, column in x.items() if isinstance(x, dict) else ():
            if len(column) != len(wanted):
                raise Finding(f"column {name!r} of {len(wanted)} records has {len(column)} of them")


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
        _read_all(reader.for_inputs(_inputs(m, _COLUMNS)))


READER_FILES: tuple[type[Target], ...] = tuple(
    type(f"{name.title()}Files", (_ReaderFiles,), {"name": name, "suffix": f".{name}", "form": form})
    for name, form in FORMATS.items()
)


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
