"""Keras on TensorFlow."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.pyct import loader

from elastable.embedding_store.contract.arrays import Array, aligned, is_aligned
from elastable.embedding_store.errors import BadInput, ElastableError
from elastable.master.backend.contract import Backend, Update

_MOST_THREADS = 2**31 - 1  # TensorFlow's number has 32 bits
_FEW_BYTES = 4_096  # of which a second copy is cheaper than a capsule


class TensorFlowBackend(Backend):
    """Functions are graphs."""

    name = "tensorflow"
    has_graphs = True

    def copied(self, variable: keras.Variable) -> Array:
        # Raw, as every version is read while workers wait. Nothing is copied yet: TensorFlow copies a
        # variable's buffer when it is changed while anybody holds it.
        value = variable.value
        copy: Array = np.asarray(tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype))
        copy.setflags(write=False)
        return copy

    def assign(self, variable: keras.Variable, value: Array) -> None:
        target = variable.value
        # A raw operation: all workers of a version wait for this, and the shapes are known to match.
        tf.raw_ops.AssignVariableOp(resource=target.handle, value=tf.convert_to_tensor(value, target.dtype))

    def tensor(self, array: Array, ours: bool = False) -> tf.Tensor:
        if array.dtype.kind not in "fiu" or array.nbytes < _FEW_BYTES:
            return tf.convert_to_tensor(array)
        if not (ours and is_aligned(array)):
            # TensorFlow itself copies twice: once always, and once more to memory that is aligned.
            given, array = array, aligned(array.shape, array.dtype)
            array[...] = given
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())

    def update(
        self,
        body: Update,
        like: Sequence[Array],
        variables: Sequence[keras.Variable],
        eagerly: bool = False,
    ) -> Callable[..., list[Array]]:
        signature = [tf.TensorSpec(each.shape, tf.as_dtype(each.dtype)) for each in like]
        compiled = tf.function(body, autograph=False, input_signature=signature).get_concrete_function()

        def run(*arrays: Array) -> list[Array]:
            return [tensor.numpy() for tensor in compiled(*map(self.tensor, arrays)) or ()]

        return run

    def set_threads(self, threads: int) -> None:
        """Sets this many threads within an operation, and one between operations; see `Backend`.

        Raises:
            BadInput: TensorFlow cannot have so many.
            ElastableError: TensorFlow has already started with another number.
        """
        if threads > _MOST_THREADS:
            raise BadInput(f"intra_op_threads {threads}: at most {_MOST_THREADS}; a machine has a few for each core")
        if tf.config.threading.get_intra_op_parallelism_threads() == threads:
            return
        try:
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(1)
        except RuntimeError as error:
            raise ElastableError(
                f"TensorFlow already runs with other threads than the job's {threads}; set them before its first "
                "operation"
            ) from error


BACKEND = TensorFlowBackend()


# AutoGraph writes every function that it converts to a file, and removes the files when the process exits: those of a
# killed process would stay for ever. So a file is removed as soon as it has been read, from the import of this module
# on. Its source is kept in `linecache`, for tracebacks and `inspect.getsource`.

_load_source = loader.load_source


def _load_and_remove(source: str, delete_on_exit: bool) -> tuple[ModuleType, str]:
    """AutoGraph's `load_source`, without leaving the file."""
    module, file = _load_source(source, delete_on_exit)
    if delete_on_exit:
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        with suppress(OSError):  # already gone, removed by a clean-up of the machine
            os.remove(file)
    return module, file


loader.load_source = _load_and_remove
