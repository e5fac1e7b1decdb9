"""`et.save`: a Keras model with tables in a store, into one file."""

from pathlib import Path

import keras

from elastable.embedding_store.errors import BadInput
from elastable.worker.rows.saved_rows import LARGEST_TABLE_BYTES, writing_tables_of


def save(
    model: keras.Model, path: str | Path, *, largest_table_bytes: int = LARGEST_TABLE_BYTES, **options: object
) -> None:
    """Saves a model as `model.save` or `model.save_weights` does, with tables of up to a size that you say.

    Those two write tables of at most 1 GiB.

    Args:
        model: A built Keras model.
        path: A file `.keras` (the model) or `.weights.h5` (its weights).
        largest_table_bytes: Tables whose rows take more, in float32, are refused. All rows of a table are in memory
            while it is written.
        options: As of `model.save` or `model.save_weights`, such as `overwrite`.

    Raises:
        BadInput: a path of another kind.
        Unsupported: a table is larger.
    """
    kind = next((kind for kind in (".keras", ".weights.h5") if str(path).endswith(kind)), None)
    if kind is None:
        raise BadInput(f"path {str(path)!r}: et.save writes a .keras file, or weights to a .weights.h5 file")
    if largest_table_bytes < 0:
        raise BadInput(f"largest_table_bytes={largest_table_bytes}: need a number of bytes")
    with writing_tables_of(largest_table_bytes):
        (model.save if kind == ".keras" else model.save_weights)(path, **options)
