"""Dense variables over replicas: what is sharded and why, the split, sums, whole tensors and norms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.composite.locations import (
    LocationSettings,
    TensorLocation,
    TensorLocationSettings,
    plan_tables,
    refuse_sharding,
)
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, BadSpec, Unsupported
from elastable.replicas.groups.group import CommGroup, ReplicaGroup, ReplicaGrouping
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.training import sharded_variables as exchange_module
from elastable.replicas.training.part_optimizer import GradientClipping, clip_parts, squared_norms
from elastable.replicas.training.sharded_variables import (
    DenseVariable,
    Exchange,
    Layout,
    VariablePlacement,
    VariableSplit,
    plan_variables,
    sharding_of,
    update_domains,
)


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


# The elementwise balanced split: numpy.array_split, padded to equal buffers


COUNTS = st.integers(1, 200)
PARTS = st.integers(1, 24)


def test_thirty_elements_over_four_replicas() -> None:
    # ORACLES "Tensor locations (PopART)": two of 8 and two of 7 plus one pad, each buffer of length 8.
    split = VariableSplit(30, 4)
    assert split.length == 8
    assert [split.bounds(part) for part in range(4)] == [(0, 8), (8, 16), (16, 23), (23, 30)]
    tensor = np.arange(1, 31, dtype=np.float32).reshape(5, 6)
    buffers = np.stack([split.take(part, tensor) for part in range(4)])
    assert buffers.shape == (4, 8)
    assert (buffers == 0).sum(axis=1).tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(split.join(buffers), np.arange(1, 31))


@given(COUNTS, PARTS)
def test_parts_are_those_of_array_split(elements: int, parts: int) -> None:
    split, tensor = VariableSplit(elements, parts), np.arange(1, elements + 1)
    assert split.length == -(-elements // parts)
    for part, expected in enumerate(np.array_split(tensor, parts)):
        first, last = split.bounds(part)
        np.testing.assert_array_equal(tensor[first:last], expected)
        buffer = split.take(part, tensor)
        np.testing.assert_array_equal(buffer[: len(expected)], expected)
        assert not buffer[len(expected) :].any()


@given(COUNTS, PARTS, st.integers(0, 3))
def test_put_is_take_of_every_part_and_join_undoes_both(elements: int, parts: int, more: int) -> None:
    split, tensor = VariableSplit(elements, parts), np.arange(1.0, elements + 1)
    rows = np.full((parts, split.length + more), -1.0)
    split.put(tensor, rows)
    np.testing.assert_array_equal(
        rows[:, : split.length], np.stack([split.take(part, tensor) for part in range(parts)])
    )
    assert (rows[:, split.length :] == -1).all()
    np.testing.assert_array_equal(split.join(rows[:, : split.length]), tensor)


def test_empty_splits_and_missing_parts_are_refused() -> None:
    for elements, parts in ((0, 1), (1, 0), (-1, 2)):
        with pytest.raises(BadInput, match="must be at least 1"):
            VariableSplit(elements, parts)
    with pytest.raises(BadInput, match=r"no part 4; the parts are 0 to 3"):
        VariableSplit(30, 4).bounds(4)


# Which variables are shared over replicas, and why


SHARDED = TensorLocation(replicated_tensor_sharding=True)
PAIRS = TensorLocation(replicated_tensor_sharding=True, sharding_domain=CommGroup("consecutive", 2))
SETTINGS = TensorLocationSettings(SHARDED)
KERNEL = DenseVariable("net/dense/kernel", (128, 64), slots=2)
BIAS = DenseVariable("net/dense/bias", (64,), slots=2)


def test_the_thresholds_of_popart() -> None:
    # ORACLES: fewer than 8192 elements, one replica, or an activation: no sharding. An override knows no threshold.
    assert SETTINGS.min_elements_for_replicated_tensor_sharding == 8192
    everyone = ReplicaGrouping(4, 1, 4)
    assert sharding_of("weight", 8192, SETTINGS, None, 4) == (everyone, "setting, 8,192 elements")
    assert sharding_of("weight", 8191, SETTINGS, None, 4) == (
        None,
        "8,191 elements, fewer than min_elements_for_replicated_tensor_sharding=8,192",
    )
    assert sharding_of("weight", 8192, SETTINGS, None, 1) == (None, "one replica")
    assert sharding_of("activation", 8192, SETTINGS, None, 4)[0] is None
    assert sharding_of("weight", 30, SETTINGS, SHARDED, 4) == (everyone, "override by name")
    assert sharding_of("weight", 8192, SETTINGS, TensorLocation(), 4) == (None, "override by name")
    assert sharding_of("weight", 8192, TensorLocationSettings(), None, 4)[0] is None


def test_domains() -> None:
    assert sharding_of("weight", 30, SETTINGS, PAIRS, 4)[0] == ReplicaGrouping(4, 1, 2)
    apart = TensorLocation(replicated_tensor_sharding=True, sharding_domain=CommGroup("orthogonal", 2))
    assert sharding_of("weight", 30, SETTINGS, apart, 4)[0] == ReplicaGrouping(4, 2, 2)
    alone = TensorLocation(replicated_tensor_sharding=True, sharding_domain=CommGroup("consecutive", 1))
    assert sharding_of("weight", 30, SETTINGS, alone, 4) == (None, "a sharding domain of one replica")
    with pytest.raises(BadInput, match="2 does not divide 3 replicas"):
        sharding_of("weight", 30, SETTINGS, PAIRS, 3)


def test_a_plan() -> None:
    settings = LocationSettings(SETTINGS, SETTINGS, overrides={"bias/optimizer_state": PAIRS})
    everyone = ReplicaGrouping(4, 1, 4)
    small = "64 elements, fewer than min_elements_for_replicated_tensor_sharding=8,192"
    assert plan_variables([KERNEL, BIAS], settings, 4) == (
        VariablePlacement(KERNEL.name, "weight", 8192, 32768, 8192, everyone, "setting, 8,192 elements"),
        VariablePlacement(KERNEL.name, "optimizer_state", 16384, 65536, 16384, everyone, "setting, 8,192 elements"),
        VariablePlacement(BIAS.name, "weight", 64, 256, 256, None, small),
        VariablePlacement(BIAS.name, "optimizer_state", 128, 512, 256, ReplicaGrouping(4, 1, 2), "override by name"),
    )


def test_state_alone_and_weight_alone() -> None:
    halves = ReplicaGrouping(2, 1, 2)
    for chosen, domains in (
        (LocationSettings(optimizer_state=SETTINGS), [None, halves]),
        (LocationSettings(SETTINGS), [halves, None]),
    ):
        lines = plan_variables([KERNEL], chosen, 2)
        assert [line.domain for line in lines] == domains
        assert update_domains(lines) == {KERNEL.name: domains[1]}


def test_a_domain_without_sharding_has_no_effect() -> None:
    whole = TensorLocationSettings(TensorLocation(sharding_domain=CommGroup("consecutive", 2)))
    lines = plan_variables([KERNEL], LocationSettings(whole, TensorLocationSettings(PAIRS), whole), 4)
    assert [line.domain for line in lines] == [None, ReplicaGrouping(4, 1, 2)]
    refuse_sharding(LocationSettings(whole, whole, whole))


def test_an_optimizer_without_state_has_no_line_of_it() -> None:
    stateless = DenseVariable("kernel", (128, 64))
    (line,) = plan_variables([stateless], LocationSettings(SETTINGS, TensorLocationSettings()), 2)
    assert line.domain is not None
    assert update_domains([line]) == {"kernel": line.domain}


def test_linked_tensors_share_a_domain() -> None:
    apart = LocationSettings(overrides={"kernel": SHARDED, "kernel/optimizer_state": PAIRS})
    with pytest.raises(BadSpec, match=r"over each 4 of 4 replicas .* over each 2 of 4 replicas .* linked"):
        plan_variables([KERNEL], apart, 4)
    # Written differently, the same replicas are the same domain.
    same = TensorLocation(replicated_tensor_sharding=True, sharding_domain=CommGroup("consecutive", 4))
    plan_variables([KERNEL], LocationSettings(overrides={"kernel": SHARDED, "kernel/optimizer_state": same}), 4)


def test_a_variable_sharded_twice() -> None:
    with pytest.raises(BadSpec, match=r"'net/dense/kernel' is sharded twice; give each variable once"):
        plan_variables([KERNEL, BIAS, KERNEL], LocationSettings(), 2)
    both = LocationSettings(overrides={"kernel": SHARDED, "dense/kernel": PAIRS})
    with pytest.raises(BadSpec, match=r"sharded twice: override 'kernel' names it, and 'dense/kernel'"):
        plan_variables([KERNEL, BIAS], both, 4)


def test_overrides_that_fit_nothing_or_too_much() -> None:
    with pytest.raises(BadSpec, match=r"'dense/kernle': there is no such variable; did you mean 'net/dense/kernel'"):
        plan_variables([KERNEL], LocationSettings(overrides={"dense/kernle": SHARDED}), 2)
    other = DenseVariable("net/other/kernel", (2, 2))
    with pytest.raises(BadSpec, match=r"'kernel' fits net/dense/kernel, net/other/kernel: name one"):
        plan_variables([KERNEL, other], LocationSettings(overrides={"kernel": SHARDED}), 2)


def test_a_constraint_needs_the_whole_weight() -> None:
    unit = DenseVariable("kernel", (128, 64), slots=1, constrained=True)
    lines = plan_variables([unit], LocationSettings(SETTINGS, SETTINGS), 2)
    assert [line.domain is None for line in lines] == [True, False]
    assert lines[0].reason == "its constraint needs all of it after every update"
    with pytest.raises(BadSpec, match="has a constraint"):
        plan_variables([unit], LocationSettings(overrides={"kernel": SHARDED}), 2)


def test_dense_variables_are_not_in_redis() -> None:
    redis = LocationSettings(weight=TensorLocationSettings(TensorLocation("redis")))
    with pytest.raises(BadSpec, match="weight in 'redis': dense variables live in the memory"):
        plan_variables([KERNEL], redis, 2)


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(BadSpec, match="min_elements_for_replicated_tensor_sharding must not be negative, got -1"):
        TensorLocationSettings(min_elements_for_replicated_tensor_sharding=-1)
    with pytest.raises(BadSpec, match="accumulator with replicated_tensor_sharding"):
        LocationSettings(accumulator=SETTINGS)


def test_a_job_with_a_master_is_refused_with_the_reason() -> None:
    with pytest.raises(Unsupported, match=r"weight: .* together with async push: an async push is applied when it"):
        refuse_sharding(LocationSettings(SETTINGS, SETTINGS), "async")
    with pytest.raises(Unsupported, match=r"users: .* the master of a job holds"):
        refuse_sharding(LocationSettings(overrides={"users": SHARDED}))
    with pytest.raises(Unsupported, match="optimizer_state"):
        plan_tables({}, LocationSettings(optimizer_state=SETTINGS))
    refuse_sharding(LocationSettings(), "async")
