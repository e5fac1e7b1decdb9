"""Extents of one memory: whoever gets one next finds zeros, and nobody else's bytes change."""

import gc

import numpy as np
import pytest

from elastable.embedding_store.wire.shared.sealed_memory import SealedMemory
from elastable.embedding_store.wire.shared.shared_store import SharedSlab


@pytest.mark.parametrize("written", [0, 10, 1_000], ids=["untouched", "begun", "full"])
def test_an_extent_that_was_given_back_is_zeros_and_its_neighbours_are_as_they_were(written: int) -> None:
    memory = SealedMemory("weights", 3)

    def slab() -> SharedSlab:
        extent = memory.extent()
        assert extent is not None
        return SharedSlab(extent, 1_000, 64, np.float32)

    before, own, behind = slab(), slab(), slab()
    assert memory.extent() is None
    for neighbour in (before, behind):
        neighbour.array[:] = 7
    own.array[:written] = 5
    del own
    gc.collect()
    again = slab()
    assert not again.array.any()
    assert (before.array == 7).all()
    assert (behind.array == 7).all()
