"""Thread counts of TensorFlow: what it cannot have is refused before it starts."""

import pytest

from elastable.embedding_store.errors import BadInput
from elastable.worker.keras.tensorflow_threads import set_intra_op_threads


def test_more_threads_than_tensorflow_can_count() -> None:
    with pytest.raises(BadInput, match="intra_op_threads 2147483648: at most 2147483647"):
        set_intra_op_threads(2**31)
