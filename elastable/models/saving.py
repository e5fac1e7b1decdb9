"""Models with tables in a store, written to files: `et.save`, and `elastable export` of a version of a job."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import keras

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.tables.row_blocks import convert_table
from elastable.master.backend.contract import backend
from elastable.master.checkpoints.writing import write_checkpoint
from elastable.master.commits.version_record import job_from_json
from elastable.master.model.dense import dense_part
from elastable.models.versions import is_followed, model_of_job, open_versions, take_weights
from elastable.worker.rows.model_inputs import inputs_of
from elastable.worker.rows.saved_rows import LARGEST_TABLE_BYTES, writing_tables_of
from elastable.worker.user_model.export import export_keras


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


def export_version(
    source: str | Path,
    output: Path,
    kind: str,
    *,
    version: int | None = None,
    checkpoints: str | Path | None = None,
    dtype: str | None = None,
    model_file: str | Path | None = None,
    deadline_s: float | None = None,
) -> int:
    """Writes the model of a version that a job has left or made; the job may go on meanwhile.

    All rows are in memory while they are written, those of a store that is followed with their slots.

    Args:
        source, version, checkpoints, model_file, deadline_s: As of `et.Predictor`.
        output: A file `.keras`, or a folder.
        kind: "keras": a plain model, in a file. "savedmodel": a SavedModel. "serving": weights alone as a checkpoint,
            which `et.Predictor` and `serve-model` take; of a store it names the URL, as what goes on from there.
        dtype: How rows are kept, one of `WEIGHT_DTYPES`, which no store goes on with; None: as they are.

    Returns:
        The version.

    Raises:
        BadInput: the output is there, or cannot be written, or a weight that the dtype cannot hold; nothing is left.
        Unsupported: the model cannot be written so.
        Otherwise as `et.Predictor`.
    """
    if kind == "savedmodel" and not backend().has_graphs:
        raise Unsupported(
            f"--format savedmodel is TensorFlow's, and Keras runs on {backend().name}: write --format serving, or keras"
        )
    with closing(open_versions(source, version, checkpoints, deadline_s)) as versions, MemoryStore() as store:
        with versions.current(-1) as (number, record):
            assert record is not None  # of no version that was taken before
            model = model_of_job(versions.job, model_file)
            weights = take_weights(model, dense_part(model, None), store, record)
            for table, spec in versions.rows.specs().items():
                convert_table(versions.rows, table, store, dtype or spec.dtype, trained=False)
        store.reset_version(number)
        with _draft_of(output) as draft:
            if kind == "serving":
                home, job = draft.parent, job_from_json(versions.job)
                if is_followed(source) and dtype is None:
                    parts = urlsplit(str(source))  # a login is left to the environment of who opens it
                    job = replace(job, store_url=parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
                os.rename(write_checkpoint(home, store, weights, job, record.progress), draft)
            elif kind == "savedmodel":
                _export_graph(model, draft)
            else:
                export_keras(model, store, draft)
    return number


@contextmanager
def _draft_of(output: Path) -> Iterator[Path]:
    """What is written there becomes the output when it is whole; nothing is left of anything else."""
    try:
        home = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.absolute().parent))
    except OSError as error:
        raise BadInput(f"--output {output} cannot be written: {error}") from error
    try:
        yield home / output.name
        if os.path.lexists(output):
            raise BadInput(f"--output {output} has come meanwhile, and nothing is overwritten")
        os.rename(home / output.name, output)
    except OSError as error:
        raise BadInput(f"--output {output} cannot be written: {error}") from error
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _export_graph(model: keras.Model, folder: Path) -> None:
    if inputs_of(model) is None:
        raise Unsupported(
            f"model {model.name!r} has no inputs with names and dtypes, which a SavedModel needs: make it of "
            "keras.Input (Functional, or Sequential with a keras.Input), or write --format serving"
        )
    model.export(folder, verbose=False)
