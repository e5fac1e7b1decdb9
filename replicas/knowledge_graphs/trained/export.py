"""A trained model's embeddings in files for other programs: NumPy or Parquet."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph import inverse_names
from elastable.replicas.knowledge_graphs.scores import row_layout
from elastable.replicas.knowledge_graphs.trained.trained_graph import TrainedGraph

__all__ = ["FORMATS", "export_embeddings"]


def export_embeddings(trained: TrainedGraph, folder: Path, kind: str) -> list[Path]:
    """Writes a model into a new folder, in which a file `model.json` says what the columns of rows are.

    Entities have the order of their ids; relations too, with inverse ones behind all others, named `NAME (inverse)`.

    Args:
        trained: The model.
        folder: Must not exist, or be empty.
        kind: One of `FORMATS`.

    Returns:
        The files.

    Raises:
        BadInput: an unknown format, or a folder that holds something or cannot be written; nothing is left.
    """
    if kind not in FORMATS:
        raise BadInput(f"export as {kind!r}: known are {', '.join(FORMATS)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} exists; export writes a new folder")
    names = {"entities": list(trained.entities), "relations": list(trained.relations)}
    if trained.settings.reciprocal:
        names["relations"] += inverse_names(names["relations"])
    draft = folder.with_name(f".{folder.name}.new")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        tables = {"entities": trained.embeddings(), "relations": trained.model.relations}
        dense = dict(trained.model.score.dense)
        FORMATS[kind](draft, names, tables, dense)
        about = {"format": kind, "settings": trained.settings.as_json(), **_about(trained, dense)}
        (draft / "model.json").write_text(json.dumps(about, indent=2) + "\n")
        draft.replace(folder)
    except OSError as error:
        raise BadInput(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return sorted(folder.iterdir())


def _about(trained: TrainedGraph, dense: Mapping[str, Float32]) -> dict[str, object]:
    score = trained.model.score
    return {
        "model": score.name,
        "entities": len(trained.entities),
        "relations": len(trained.relations),
        "inverse_relations": trained.settings.reciprocal,
        "rows": row_layout(score).as_json(),
        "further_variables": {name: list(value.shape) for name, value in dense.items()},
    }


Tables = Mapping[str, Float32]


def _numpy(folder: Path, names: Mapping[str, Sequence[str]], tables: Tables, dense: Tables) -> None:
    for table, rows in tables.items():
        np.save(folder / f"{table}.npy", rows)
        (folder / f"{table}.txt").write_text("".join(f"{name}\n" for name in names[table]), encoding="utf-8")
    for name, value in dense.items():
        np.save(folder / f"{name}.npy", value)


def _parquet(folder: Path, names: Mapping[str, Sequence[str]], tables: Tables, dense: Tables) -> None:
    for table, rows in tables.items():
        embedding = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
        columns = {"id": pa.array(np.arange(len(rows))), "name": pa.array(names[table]), "embedding": embedding}
        pyarrow.parquet.write_table(pa.table(columns), folder / f"{table}.parquet")
    for name, value in dense.items():
        np.save(folder / f"{name}.npy", value)


FORMATS: Mapping[str, Callable[[Path, Mapping[str, Sequence[str]], Tables, Tables], None]] = {
    "numpy": _numpy,
    "parquet": _parquet,
}
"""Formats by name."""
