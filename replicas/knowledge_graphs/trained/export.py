"""A trained model's embeddings in formats of other programs: NumPy, Parquet, word2vec, safetensors for torch."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.errors import BadInput
from elastable.master.checkpoints.storage.tensor_file import parts_of
from elastable.replicas.knowledge_graphs.graph.names import inverse_names
from elastable.replicas.knowledge_graphs.scores.row_layouts import row_layout
from elastable.replicas.knowledge_graphs.trained.trained_graph import TrainedGraph

__all__ = ["FORMATS", "export_embeddings"]

_ROWS = 4096  # formatted at once


def export_embeddings(trained: TrainedGraph, folder: Path, kind: str, spaces: str | None = None) -> list[Path]:
    """Writes a model into a new folder, in which a file `model.json` says what the columns of rows are.

    Entities have the order of their ids; relations too, with inverse ones behind all others, named
    `NAME (inverse)`, or `NAME_(inverse)` in word2vec, whose names hold no spaces.

    Args:
        trained: The model.
        folder: Must not exist, or be empty.
        kind: One of `FORMATS`.
        spaces: What replaces spaces in names, for word2vec; None: names of the graph with spaces are refused.

    Returns:
        The files.

    Raises:
        BadInput: an unknown format, a folder that holds something or cannot be written, or names that the format
            cannot have; nothing is left.
    """
    if kind not in FORMATS:
        raise BadInput(f"export as {kind!r}: known are {', '.join(FORMATS)}")
    if spaces is not None and kind != "word2vec":
        raise BadInput(f"names in {kind} may hold spaces; only word2vec replaces them")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} exists; export writes a new folder")
    names = {"entities": list(trained.entities), "relations": list(trained.relations)}
    if kind == "word2vec":
        names = {table: _words(of, spaces) for table, of in names.items()}
    if trained.settings.reciprocal:
        names["relations"] += inverse_names(names["relations"], (spaces or "_") if kind == "word2vec" else " ")
    draft = folder.with_name(f".{folder.name}.new")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        tables = {"entities": trained.embeddings(), "relations": trained.model.relations}
        dense = {} if kind == "word2vec" else dict(trained.model.score.dense)
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


def _words(names: Sequence[str], spaces: str | None) -> list[str]:
    """Names without white space, each still its own."""
    if spaces is not None and (not spaces or any(sign.isspace() for sign in spaces)):
        raise BadInput(f"spaces are replaced by {spaces!r}: name something that holds none")
    found = names if spaces is None else [spaces.join(name.split()) for name in names]
    for name in found:
        if any(sign.isspace() for sign in name) or not name:
            raise BadInput(f"{name!r}: names in word2vec files hold no spaces; name a replacement, such as _")
    twice = next((name for name, count in Counter(found).items() if count > 1), None)
    if twice is not None:
        raise BadInput(f"with spaces replaced by {spaces!r}, two names are {twice!r}; name another replacement")
    return list(found)


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


def _word2vec(folder: Path, names: Mapping[str, Sequence[str]], tables: Tables, dense: Tables) -> None:
    for table, rows in tables.items():
        with (folder / f"{table}.txt").open("w", encoding="utf-8", newline="\n") as file:
            file.write(f"{len(rows)} {rows.shape[1]}\n")
            for first in range(0, len(rows), _ROWS):
                some = rows[first : first + _ROWS].astype(str)  # the shortest digits that give the same float32
                for name, row in zip(names[table][first : first + _ROWS], some.tolist(), strict=True):
                    file.write(f"{name} {' '.join(row)}\n")


def _torch(folder: Path, names: Mapping[str, Sequence[str]], tables: Tables, dense: Tables) -> None:
    tensors = {f"{table}.weight": [rows] for table, rows in tables.items()}
    tensors |= {name: [value] for name, value in dense.items()}
    with (folder / "model.safetensors").open("wb") as file:
        for part in parts_of(tensors, {"format": "pt"}):
            file.write(part)
    for table, of in names.items():
        (folder / f"{table}.txt").write_text("".join(f"{name}\n" for name in of), encoding="utf-8")


FORMATS: Mapping[str, Callable[[Path, Mapping[str, Sequence[str]], Tables, Tables], None]] = {
    "numpy": _numpy,
    "parquet": _parquet,
    "word2vec": _word2vec,
    "torch": _torch,
}
"""Formats by name."""
