import numpy as np
import pytest

from elastable.embedding_store.native.slab import Slab


def test_growing_keeps_values_and_adds_zeros() -> None:
    slab = Slab(10, 3)
    slab.array[:] = 7
    slab.grow(1_000_000)
    assert slab.array.shape == (1_000_000, 3)
    assert (slab.array[:10] == 7).all()
    assert not slab.array[10:].any()
    slab.grow(5)
    assert len(slab.array) == 1_000_000


def test_growing_under_a_view_copies() -> None:
    slab = Slab(10, 2, np.int64)
    view = slab.array
    view[:] = 5
    slab.grow(1000)
    slab.array[0] = 6
    assert (view == 5).all()
    assert (slab.array[1:10] == 5).all()


def test_address_space_costs_no_memory() -> None:
    slab = Slab(1 << 30, 4)
    slab.array[-1] = 1
    assert slab.array[-1].tolist() == [1] * 4


def test_more_than_there_is_room_for() -> None:
    with pytest.raises(MemoryError, match="address space"):
        Slab(1 << 50, 16)
    slab = Slab(4, 4)
    slab.array[:] = 3
    with pytest.raises(MemoryError):
        slab.grow(1 << 50)
    assert (slab.array == 3).all()
