"""Every float16 there is, and a million floats: our bits against numpy's and against the definition."""

import numpy as np
import pytest

from elastable.embedding_store import TableSpec
from elastable.embedding_store.native.number_formats import (
    HALF_DTYPES,
    gather_half,
    round_half,
    round_half_randomly,
    scatter_half,
)
from elastable.embedding_store.native.slab import anonymous_slab
from elastable.embedding_store.tables.row_dtypes import row_values

DIM = 64
EVERY_NUMBER = np.arange(1 << 16, dtype=np.uint16).reshape(-1, DIM)


def widened(dtype: str, numbers: np.ndarray) -> np.ndarray:
    out = np.empty(numbers.shape, np.float32)
    gather_half(HALF_DTYPES[dtype], numbers, np.arange(len(numbers)), out)
    return out


def narrowed(dtype: str, values: np.ndarray, bits: np.ndarray | None = None) -> np.ndarray:
    numbers = np.zeros(values.shape, np.uint16)
    scatter_half(HALF_DTYPES[dtype], values, bits, numbers, np.arange(len(values)))
    return numbers


def many_floats() -> np.ndarray:
    """Every magnitude a float32 has, most often those of weights, and the ties between halves."""
    random = np.random.default_rng(0)
    raw = random.integers(0, 2**32, 1 << 19, dtype=np.uint64).astype(np.uint32).view(np.float32)
    scaled = random.normal(size=1 << 19) * 10.0 ** random.integers(-9, 6, 1 << 19)
    finite = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    ties = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(ties, np.float32(side)) for side in (np.inf, -np.inf)]
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 65536, 3.3895e38, 3.4e38, 1e-45])
    edges = edges.astype(np.float32)
    values = np.concatenate([raw, scaled.astype(np.float32), ties, -ties, *beside, edges])
    return np.resize(values, (-(-len(values) // DIM), DIM))


def as_bfloat(values: np.ndarray) -> np.ndarray:
    """Nearest, ties to even, by comparing distances in float64; infinity beyond the middle of the last step."""
    bits = values.view(np.uint32)
    below, above = (bits >> 16).astype(np.uint32), ((bits >> 16) + 1).astype(np.uint32)
    low = (below << 16).view(np.float32).astype(np.float64)
    high = (above << 16).view(np.float32).astype(np.float64)
    step = np.where(np.isfinite(high), high - low, 2.0**120 * np.sign(low))
    share = (values.astype(np.float64) - low) / np.where(step == 0, 1, step)
    up = (share > 0.5) | ((share == 0.5) & (below % 2 == 1))
    return np.where(np.isinf(values), below, np.where(up, above, below)).astype(np.uint16)


def test_every_float16_reads_as_in_numpy() -> None:
    ours, theirs = widened("float16", EVERY_NUMBER), EVERY_NUMBER.view(np.float16).astype(np.float32)
    number = ~np.isnan(theirs)
    np.testing.assert_array_equal(ours.view(np.uint32)[number], theirs.view(np.uint32)[number])
    np.testing.assert_array_equal(np.isnan(ours), ~number)


def test_every_bfloat16_is_the_upper_half_of_its_float32() -> None:
    ours = widened("bfloat16", EVERY_NUMBER)
    np.testing.assert_array_equal(ours.view(np.uint32), EVERY_NUMBER.astype(np.uint32) << 16)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_what_was_read_is_written_back_as_it_was(dtype: str) -> None:
    values = widened(dtype, EVERY_NUMBER)
    number = ~np.isnan(values)
    for bits in (None, np.full_like(EVERY_NUMBER, 0xFFFF), np.zeros_like(EVERY_NUMBER)):
        np.testing.assert_array_equal(narrowed(dtype, values, bits)[number], EVERY_NUMBER[number])
        assert np.isnan(widened(dtype, narrowed(dtype, values, bits))[~number]).all()


def test_a_million_floats_round_as_in_numpy() -> None:
    values = many_floats()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        theirs = values.astype(np.float16)
    ours, number = narrowed("float16", values), ~np.isnan(values)
    np.testing.assert_array_equal(ours[number], theirs.view(np.uint16)[number])
    assert np.isnan(ours.view(np.float16)[~number]).all()


def test_a_million_floats_round_to_the_nearest_bfloat16() -> None:
    values = many_floats()
    number = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        expected = as_bfloat(values)
    ours = narrowed("bfloat16", values)
    np.testing.assert_array_equal(ours[number], expected[number])
    assert np.isnan(widened("bfloat16", ours)[~number]).all()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_random_rounding_takes_a_neighbour_and_goes_up_as_often_as_it_should(dtype: str) -> None:
    values = np.random.default_rng(1).normal(size=(40, DIM)).astype(np.float32)
    values *= 10.0 ** np.random.default_rng(2).integers(-7, 4, (40, 1)).astype(np.float32)
    total, highest, lowest = np.zeros(values.shape), np.full(values.shape, -np.inf), np.full(values.shape, np.inf)
    draws = range(0, 1 << 16, 16)  # every sixteenth of all there are: an exact mean but for 1/4096 of a step
    for bits in draws:
        rounded = widened(dtype, narrowed(dtype, values, np.full(values.shape, bits, np.uint16)))
        total += rounded
        highest, lowest = np.maximum(highest, rounded), np.minimum(lowest, rounded)
    assert ((lowest <= values) & (values <= highest)).all()
    step = highest - lowest
    nearest = widened(dtype, narrowed(dtype, values))
    assert ((nearest == lowest) | (nearest == highest)).all()
    assert (np.abs(total / len(draws) - values) <= step / 4000).all()


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 65504.0), ("bfloat16", 3.3895313892515355e38)])
def test_random_rounding_never_goes_up_to_infinity(dtype: str, largest: float) -> None:
    step = 32.0 if dtype == "float16" else 2.0**120
    values = np.array([[largest, -largest, largest + 0.4 * step, largest + 0.6 * step, np.inf]])
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    rounded = widened(dtype, narrowed(dtype, values, np.full(values.shape, 0xFFFF, np.uint16)))
    np.testing.assert_array_equal(rounded[0], np.array([largest, -largest, largest, np.inf, np.inf], np.float32))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_rounding_in_place_equals_writing_and_reading(dtype: str) -> None:
    values = np.random.default_rng(3).normal(size=(9, 5)).astype(np.float32)
    bits = np.random.default_rng(4).integers(0, 1 << 16, (9, 5)).astype(np.uint16)
    expected = widened(dtype, narrowed(dtype, values, bits))
    there = values.copy()
    round_half_randomly(HALF_DTYPES[dtype], there, bits)
    np.testing.assert_array_equal(there, expected)
    there = values.copy()
    round_half(HALF_DTYPES[dtype], there, np.array([4, 0]))
    expected = values.copy()
    expected[[4, 0]] = widened(dtype, narrowed(dtype, values[[4, 0]]))
    np.testing.assert_array_equal(there, expected)


@pytest.mark.parametrize("dtype", [*HALF_DTYPES, "int8"])
def test_rows_may_be_columns_of_a_wider_buffer(dtype: str) -> None:
    spec, random = TableSpec("t", DIM, 9, dtype), np.random.default_rng(6)
    values = row_values(spec, 9, anonymous_slab)
    values.write(np.arange(9), random.normal(size=(9, DIM)).astype(np.float32))
    positions, plain = np.array([3, -1, 8]), np.full((3, DIM), 7, np.float32)
    values.read(positions, plain)
    wide = np.full((3, DIM + 5), 7, np.float32)
    for out in (wide[:, 5:], wide[:, :-5], wide[:, 2:-3], np.full((6, DIM), 7, np.float32)[::2]):
        wide[:] = 7
        values.read(positions, out)
        np.testing.assert_array_equal(out, plain)
        assert (wide == 7).sum() >= 3 * 5 + DIM
    backwards = np.full((3, DIM), 7, np.float32)
    values.read(positions, backwards[::-1])
    np.testing.assert_array_equal(backwards[::-1], plain)
