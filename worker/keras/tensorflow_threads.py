"""Sets TensorFlow's thread counts, which are part of the job because they affect rounding."""

import tensorflow as tf

from elastable.embedding_store.errors import BadInput, ElastableError

_MOST = 2**31 - 1  # TensorFlow's number has 32 bits


def set_intra_op_threads(threads: int) -> None:
    """Sets this many threads within an operation, and one between operations.

    Raises:
        BadInput: TensorFlow cannot have so many.
        ElastableError: TensorFlow has already started with another number.
    """
    if threads > _MOST:
        raise BadInput(f"intra_op_threads {threads}: at most {_MOST}; a machine has a few for each core")
    if tf.config.threading.get_intra_op_parallelism_threads() == threads:
        return
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    except RuntimeError as error:
        raise ElastableError(
            f"TensorFlow already runs with other threads than the job's {threads}; set them before its first operation"
        ) from error
