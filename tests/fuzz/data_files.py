"""Files of records as other programs write them: CSV, Parquet, triples."""

import io
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastable.replicas.knowledge_graphs.graph.triple_files import Names, read_columns
from elastable.worker.readers.batch.reader import ModelInputs, Reader
from elastable.worker.readers.formats.csv_reader import CsvReader
from elastable.worker.readers.formats.parquet_reader import ParquetReader
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


_CSV = (
    b'user,item,price,name,y\r\n1,9007199254740993,1.5,"a, b",1\r\n2,-3,,"say ""hi""",0\n3,4,2e3,"two\nlines",1\n',
    b"a,b\n1,x\n2,y\n3,z\n",
    b"\xef\xbb\xbfid,t\n9223372036854775807,2024-01-31\n-9223372036854775808,2024-02-01\n",
)


class CsvFiles(_DataFile):
    """CSV as programs and people write it, and worse."""

    name = "csv"
    share = 50
    suffix = ".csv"

    def content(self, m: Mutator) -> bytes:
        return m.mutated(m.choice(_CSV), 5)

    def read(self, m: Mutator) -> None:
        names = ["a", "b"] if m.chance(0.2) else None
        fill, encoding = {"id": 0} if m.chance(0.2) else None, m.choice(("utf-8", "latin-1", "gb18030"))
        block = m.choice((1, 2, 100))
        reader = CsvReader(self.path, column_names=names, fill_null=fill, encoding=encoding, block_records=block)
        _read_all(reader.for_inputs(_inputs(m, ("user", "item", "price", "name", "a", "b", "id", "t"))))


class ParquetFiles(_DataFile):
    """Parquet, with and without page checksums, changed anywhere."""

    name = "parquet"
    share = 40
    suffix = ".parquet"

    def open(self) -> None:
        super().open()
        table = pa.table(
            {
                "id": pa.array([1, 2**53 + 1, 3, 4, 2**63 - 1], pa.int64()),
                "x": pa.array([0.5, None, 1.5, 2.0, 3.0], pa.float32()),
                "name": pa.array(["a", "b", "c", "a", "b"]).dictionary_encode(),
                "list": pa.array([[1], [2, None], [], None, [5]], pa.list_(pa.int64())),
            }
        )
        self.files = [
            _parquet(table, write_page_checksum=checksum, compression=compression, row_group_size=rows)
            for checksum, compression, rows in ((True, "none", 2), (False, "snappy", 5), (True, "zstd", 5))
        ]

    def content(self, m: Mutator) -> bytes:
        return m.mutated(m.choice(self.files))

    def read(self, m: Mutator) -> None:
        fill = m.choice((None, {"x": 0}, {"list": 1}))
        reader = ParquetReader(
            self.path, m.choice((None, ["id"], ["id", "list"])), fill_null=fill, fill_null_list={"list": [7]}
        )
        _read_all(reader.for_inputs(_inputs(m, ("id", "x", "name", "list"))))


def _parquet(table: pa.Table, **settings: object) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out, **settings)
    return out.getvalue()


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
