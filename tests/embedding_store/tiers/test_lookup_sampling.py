"""Which lookups are counted, to find out what is hot."""

from __future__ import annotations

from elastable.embedding_store.tiers.files.lookup_sampling import LookupSampling

LARGE, SMALL = 1 << 14, 100


def counted(sampling: LookupSampling, keys: int, lookups: int) -> int:
    return sum(sampling.counts(keys) for _ in range(lookups))


def test_every_small_lookup_counts_and_a_part_of_large_ones() -> None:
    sampling = LookupSampling()
    sampling.found(LARGE, LARGE // 20)
    assert counted(sampling, SMALL, 100) == 100
    assert counted(sampling, LARGE, 100) == 25


def test_all_count_at_first_and_while_much_is_not_held() -> None:
    sampling = LookupSampling()
    assert counted(sampling, LARGE, 100) == 100
    sampling.found(LARGE, LARGE // 3)
    assert counted(sampling, LARGE, 100) == 100
    sampling.found(SMALL, 0)  # tells nothing of large ones
    assert counted(sampling, LARGE, 100) == 100
    sampling.found(LARGE, 0)
    assert counted(sampling, LARGE, 100) == 25
