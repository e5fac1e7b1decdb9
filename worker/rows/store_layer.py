"""What a layer with its table in a store looks like to the modules that serve it."""

from typing import Protocol

import keras
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec


class StoreLayer(Protocol):
    """A layer whose table lives in a store; `elastable.worker.rows.store_backed.StoreBacked` implements it."""

    name: str
    input_dim: int | None
    output_dim: int
    embeddings_initializer: keras.Initializer
    embeddings_regularizer: keras.Regularizer | None
    embeddings_constraint: keras.constraints.Constraint | None
    table_dtype: str | None
    pretrained: Float32 | None
    trainable: bool
    variable_dtype: str

    @property
    def table_name(self) -> str:
        """Name of the table in the store."""

    @property
    def table_is_explicit(self) -> bool:
        """Whether the user named the table, so that layers may share it."""

    @property
    def variable_key(self) -> str:
        """What Keras optimizers keep of the variable that the table replaces, in lists of variables."""

    @property
    def seed(self) -> int:
        """Seed of the initial values while no source is attached."""

    @property
    def source(self) -> RowSource | None:
        """The source of rows outside of training, if one is attached."""

    @property
    def on_worker(self) -> bool:
        """Whether the table is a Keras variable on the worker."""

    @property
    def steps_trained(self) -> int:
        """Steps of the optimizer that trained the table; -1 if it no longer exists."""

    def attach(self, source: RowSource | None, seed: int | None = None) -> None:
        """Reads rows from `source` from now on; None: initial values of `seed`."""

    def note_steps(self, steps: int) -> None:
        """Records that the rows were loaded with the slots of an optimizer that has made this many steps."""

    def note_left_out(self) -> None:
        """Records that its rows were given in this process, and not taken (`leaving_rows_out`)."""

    def table_spec(self, seed: int | None = None, optimizer: OptimizerSpec | None = None) -> TableSpec:
        """The table this layer needs."""

    def read_rows(self, ids: Int64) -> Float32:
        """float32 `[n, dim]`: the rows of int64 `[n]` ids."""

    @property
    def embeddings(self) -> keras.Variable:
        """All rows as one weight."""

    def row_count(self) -> int:
        """The vocabulary; of a table of any id the rows that it has now."""

    def worker_rows(self) -> Float32:
        """A copy of all rows `[input_dim, output_dim]` of a table on the worker."""

    def all_rows_tensor(self) -> tf.Tensor:
        """Every row of a fixed table, float32 `[vocabulary, dim]`."""
