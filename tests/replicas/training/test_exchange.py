"""Sums, whole tensors and norms over replicas, whatever is split."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.contract.arrays import Array
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.replica_grouping import CommGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.training import sharded_variables as exchange_module
from elastable.replicas.training.part_optimizer import GradientClipping, clip_parts, squared_norms
from elastable.replicas.training.sharded_variables import Exchange, Layout


def layout_of(elements: int, comm: CommGroup, size: int) -> Layout:
    return Layout(elements, comm.grouping(size))


def reduced(size: int, comm: CommGroup, arrays: list[Array]) -> list[Array]:
    """What every replica holds once `arrays[rank]` are reduced over the domains."""

    def work(group: ReplicaGroup) -> Array:
        layout = layout_of(arrays[0].size, comm, size)
        assert layout.domain is not None
        return Exchange(group, [layout.domain]).reduce([arrays[group.rank]], [layout])[0]

    return run_threads(size, work)


def test_domains_of_neighbours_are_reduced_across() -> None:
    for rank, found in enumerate(reduced(4, CommGroup("consecutive", 2), [np.arange(12)] * 4)):
        np.testing.assert_array_equal(found, 4 * np.arange(12).reshape(2, 6)[rank % 2])


@settings(max_examples=20)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.sampled_from(["float32", "float64"])), min_size=1),
    st.integers(0, 2**32 - 1),
)
def test_a_split_changes_no_bit_of_a_sum_and_gathering_restores_it(
    size: int, kinds: list[tuple[int, bool, str]], seed: int
) -> None:
    random = np.random.default_rng(seed)
    given_to = [[random.normal(size=count).astype(dtype) for count, _, dtype in kinds] for _ in range(size)]
    layouts = [layout_of(count, CommGroup(), size) if split else Layout() for count, split, _ in kinds]

    def work(group: ReplicaGroup) -> None:
        arrays = given_to[group.rank]
        exchange = Exchange(group, [layout.domain for layout in layouts if layout.domain is not None])
        whole = exchange.reduce(arrays, [Layout()] * len(arrays))
        for place, array in enumerate(whole):
            expected = given_to[0][place].copy()
            for other in given_to[1:]:
                expected += other[place]
            assert array.tobytes() == expected.tobytes()
        parts = exchange.reduce(arrays, layouts)
        split = [place for place, layout in enumerate(layouts) if layout.domain is not None]
        for place, layout in enumerate(layouts):
            if layout.domain is None:
                assert parts[place].tobytes() == whole[place].tobytes()
            else:
                assert parts[place].tobytes() == layout.split.take(group.rank, whole[place]).tobytes()
        gathered = exchange.gather([parts[place] for place in split], [layouts[place] for place in split])
        for place, array in zip(split, gathered, strict=True):
            assert array.tobytes() == whole[place].tobytes()
        assert squared_norms(group, parts, layouts) == squared_norms(group, whole, [Layout()] * len(arrays))

    run_threads(size, work)


def test_large_tensors_are_sent_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "_MOST_BYTES", 64)

    def work(group: ReplicaGroup) -> None:
        arrays = [np.full(9, place, np.float32) for place in range(5)]
        layouts = [Layout(), *[layout_of(9, CommGroup(), 2)] * 4]
        exchange = Exchange(group, [CommGroup().grouping(2)])
        before = group.bytes_sent
        found = exchange.reduce(arrays, layouts)
        assert group.bytes_sent > before
        for place in range(1, 5):
            np.testing.assert_array_equal(found[place][: 5 - group.rank], 2 * place)

    run_threads(2, work)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_clipping_is_that_of_whole_gradients(size: int) -> None:
    random = np.random.default_rng(3)
    whole = [random.normal(size=count).astype(np.float32) for count in (30, 7, 1)]
    norms = [float(np.linalg.norm(array.astype(np.float64))) for array in whole]
    together = float(np.sqrt(sum(norm**2 for norm in norms)))

    def work(group: ReplicaGroup) -> None:
        layouts = [layout_of(30, CommGroup(), size), Layout(), layout_of(1, CommGroup(), size)]
        mine = [
            array if layout.domain is None else layout.split.take(group.rank, array)
            for array, layout in zip(whole, layouts, strict=True)
        ]
        np.testing.assert_allclose(np.sqrt(squared_norms(group, mine, layouts)), norms, rtol=1e-12)
        for clipping, scales in (
            (GradientClipping(clipnorm=0.5), [min(1.0, 0.5 / norm) for norm in norms]),
            (GradientClipping(global_clipnorm=0.5), [0.5 / together] * 3),
        ):
            clipped = clip_parts(group, clipping, mine, layouts)
            for found, before, scale in zip(clipped, mine, scales, strict=True):
                np.testing.assert_allclose(found, before * scale, rtol=1e-6)
        for found, before in zip(clip_parts(group, GradientClipping(clipvalue=0.1), mine, layouts), mine, strict=True):
            np.testing.assert_array_equal(found, np.clip(before, -0.1, 0.1))
        for found, before in zip(clip_parts(group, GradientClipping(), mine, layouts), mine, strict=True):
            assert found is before
        far = clip_parts(group, GradientClipping(global_clipnorm=1e6), mine, layouts)
        assert all(found.tobytes() == before.tobytes() for found, before in zip(far, mine, strict=True))

    run_threads(size, work)
